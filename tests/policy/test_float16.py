"""Float16: gradients beside float32, loss scales beside PyTorch's, a resumed run beside an undisturbed one."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.algorithms.values import make_value_loss
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.config import CriticConfig, Settings, check_settings, load_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.parameter_bytes import bytes_per_parameter
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.rounding import UNIT_ROUNDOFF
from grpo_mp.policy.trained_model import LOSS_SCALE, UpdateReport
from grpo_mp.trainer.loop import MAX_SKIPPED_UPDATES, PolicyContext
from grpo_mp.utils.errors import EarlyStopError, UserError
from grpo_mp.utils.types import MicroBatch
from tests.algorithms.objective import loss_of
from tests.conftest import TinyRun
from tests.parallel.inputs import with_fixed_returns
from tests.planner.jobs import BASE
from tests.save_policy import save_policy
from tests.trainer.test_update import make_trainer, spoil, weights

HALF = "model.dtype=float16"
WINDOW = 3  # updates without overflow after which the scale doubles
GROWING = f"training.megatron_args={{loss_scale_window: {WINDOW}}}"
FIRST_SCALE = 65536.0
ROUNDED = ("float16", "bfloat16")
OVERFLOWING = 1e6  # an advantage: its scaled gradient is beyond 65,504


def gradient(tiny_run: TinyRun, parallel: Parallel, *overrides: str, factor: float = 1.0) -> torch.Tensor:
    """The gradient of the first update, all parameters in one vector. `factor`: of all advantages."""
    trainer = make_trainer(tiny_run, parallel, *overrides)
    update = [replace(batch, advantages=factor * batch.advantages) for batch in trainer.compute_logprobs()[0]]
    trainer.policy.compute_gradients(update, loss_of(trainer.settings.algorithm))
    learned = [tensor for tensor in trainer.policy.tensors.values() if tensor.requires_grad]
    return torch.cat([tensor.main_grad.double().flatten() for tensor in learned]) / factor


def relative_error(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).norm() / expected.norm())


def test_the_gradient_is_as_far_from_float32_as_its_rounding(tiny_run: TinyRun, parallel: Parallel) -> None:
    exact = gradient(tiny_run, parallel)
    errors = {dtype: relative_error(gradient(tiny_run, parallel, f"model.dtype={dtype}"), exact) for dtype in ROUNDED}
    units = {dtype: errors[dtype] / UNIT_ROUNDOFF[dtype] for dtype in ROUNDED}
    assert all(0.3 < unit < 10 for unit in units.values())
    assert errors["bfloat16"] > 4 * errors["float16"]


def test_a_gradient_below_float16_s_numbers_is_kept_by_the_loss_scale(tiny_run: TinyRun, parallel: Parallel) -> None:
    """Float16 has no numbers below 2**-24."""
    exact = gradient(tiny_run, parallel)
    unscaled = gradient(tiny_run, parallel, HALF, "training.megatron_args={loss_scale: 1.0}", factor=1e-5)
    assert relative_error(unscaled, exact) > 0.3
    assert relative_error(gradient(tiny_run, parallel, HALF, factor=1e-5), exact) < 0.01


def update(trainer: Any, overflows: bool) -> UpdateReport:
    batches: Sequence[MicroBatch] = trainer.compute_logprobs()[0]
    batches = spoil(batches, OVERFLOWING) if overflows else batches
    report: UpdateReport = trainer.policy.update(batches, loss_of(trainer.settings.algorithm))
    return report


def test_scales_are_those_of_pytorchs_grad_scaler(tiny_run: TinyRun, parallel: Parallel) -> None:
    constant = "optimizer.lr_schedule=constant"
    trainer = make_trainer(tiny_run, parallel, HALF, GROWING, constant)
    reference = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=WINDOW)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter])
    norms = []
    for overflows in map(bool, (0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0)):
        before = weights(trainer.policy)
        report = update(trainer, overflows)
        assert report.measured[LOSS_SCALE] == reference.get_scale()
        assert (report.skipped, report.lowers_scale, bool(report.bad_gradients)) == (overflows,) * 3
        assert all(map(torch.equal, before, weights(trainer.policy))) is overflows
        norms += [] if overflows else [report.grad_norm]
        optimizer.zero_grad()
        reference.scale(parameter * (math.inf if overflows else 1.0)).backward()
        reference.step(optimizer)
        reference.update()
    assert trainer.policy.loss_scaler
    assert float(trainer.policy.loss_scaler.scale) == reference.get_scale() == FIRST_SCALE / 2
    full = make_trainer(tiny_run, parallel, constant)
    expected = [update(full, False).grad_norm for _ in norms]
    assert norms == pytest.approx(expected, rel=0.02)


def test_a_resumed_run_computes_the_numbers_of_an_undisturbed_one(
    tiny_run: TinyRun, parallel: Parallel, tmp_path: Path
) -> None:
    """The scale is not the first one when the state is saved, and doubles only if updates before count."""
    trainer = make_trainer(tiny_run, parallel, HALF, GROWING)
    for overflows in (True, False, False):
        update(trainer, overflows)
    save_policy(trainer.policy, tmp_path)
    resumed = make_trainer(tiny_run, parallel, HALF, GROWING)
    load_policy(resumed.policy, tmp_path)
    scales = []
    for _ in range(3):
        theirs = update(trainer, False)
        ours = update(resumed, False)
        assert (theirs.grad_norm, theirs.lr, theirs.measured) == (ours.grad_norm, ours.lr, ours.measured)
        scales.append(ours.measured[LOSS_SCALE])
    assert scales == [FIRST_SCALE / 2, FIRST_SCALE, FIRST_SCALE]
    assert all(map(torch.equal, weights(trainer.policy), weights(resumed.policy)))


def test_the_search_for_a_scale_stops_no_run_but_overflow_at_the_least_scale_does(parallel: Parallel) -> None:
    notes = list[str]()
    ctx: Any = SimpleNamespace(parallel=parallel, progress=SimpleNamespace(note=notes.append), state=TrainState())
    lowers = UpdateReport([], math.inf, 0.1, True, lowers_scale=True, measured={LOSS_SCALE: FIRST_SCALE})
    assert PolicyContext.note_skipped(ctx, [lowers] * 20, 1) == 0
    assert notes[0].endswith("; loss scale lowered from 65536")
    stays = replace(lowers, lowers_scale=False)
    assert PolicyContext.note_skipped(ctx, [stays, lowers, stays], 2) == 2
    with pytest.raises(EarlyStopError, match=f" {MAX_SKIPPED_UPDATES} in a row"):
        PolicyContext.note_skipped(ctx, [stays] * MAX_SKIPPED_UPDATES, 3)


def test_adapters_learn_and_are_merged(tiny_run: TinyRun, parallel: Parallel) -> None:
    norms = []
    for dtype in ("float32", "float16"):
        trainer = make_trainer(tiny_run, parallel, f"model.dtype={dtype}", "model.lora={rank: 4, alpha: 8}")
        before = {name: tensor.clone() for name, tensor in trainer.policy.weights.items()}
        norms.append(update(trainer, False).grad_norm)
        update(trainer, False)
        changed = {name for name, tensor in trainer.policy.weights.items() if not tensor.equal(before[name])}
        assert {"decoder.layers.0.self_attention.linear_proj.weight"} <= changed < before.keys()
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_a_critic_has_a_scale_of_its_own(tiny_run: TinyRun, parallel: Parallel) -> None:
    norms = []
    for dtype in ("float32", "float16"):
        trainer = make_trainer(tiny_run, parallel, f"model.dtype={dtype}")
        settings = trainer.settings.model_copy(update={"critic": CriticConfig(lr=0.01)})
        critic = Critic(settings.for_critic(), parallel)
        update_of = [with_fixed_returns(batch) for batch in trainer.batch.updates[0]]
        reports = [critic.update(update_of, make_value_loss(0.2)) for _ in range(2)]
        norms.append([report.grad_norm for report in reports])
        assert [report.measured.get(LOSS_SCALE) for report in reports] == [
            None if dtype == "float32" else FIRST_SCALE
        ] * 2
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_weights_beyond_float16_are_refused(tiny_run: TinyRun, parallel: Parallel, tmp_path: Path) -> None:
    for file in tiny_run.model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.norm.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    for largest, refused in ((-65504.0, False), (70000.0, True)):
        tensors[name][3] = largest
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        settings = load_settings(tiny_run.config, [f"model.path={tmp_path}", HALF, "layout={}"])
        if refused:
            with pytest.raises(UserError, match=f"{name} holds values beyond 65,504: set model.dtype=bfloat16"):
                Policy(settings, parallel, with_reference=False)
        else:
            Policy(settings, parallel, with_reference=False)


def settings_with(**training: Any) -> Settings:
    return check_settings(BASE | {"model": {"path": "m", "dtype": "float16"}, "training": training}, "test")


def test_sums_of_gradients_in_float16_are_refused() -> None:
    settings_with(megatron_args={"grad_reduce_in_fp32": True})
    with pytest.raises(UserError, match=r"grad_reduce_in_fp32=false: with model\.dtype=float16 sums of"):
        settings_with(megatron_args={"grad_reduce_in_fp32": False})


def test_bytes_per_parameter_of_float16() -> None:
    """TransformerEngine stores remainders of bfloat16 weights only (fused_adam.py, store_param_remainders)."""
    half, brain = (bytes_per_parameter(dtype, {}) for dtype in ROUNDED)
    assert half == brain
    aware = {"use_precision_aware_optimizer": True}
    assert [bytes_per_parameter(dtype, aware).optimizer for dtype in ROUNDED] == [12, 10]
