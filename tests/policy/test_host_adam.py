"""`optimizer.offload=host`: Megatron's own hybrid optimizer on a CPU, with only the answers of a device replaced."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from grpo_mp import platform
from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.examples.tiny_models import make_tiny, make_tokenizer
from grpo_mp.policy import megatron_config
from grpo_mp.policy import policy as policy_module
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.offload import device_items
from grpo_mp.policy.optimizer import build_optimizer
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.state_chunks import optimizer_chunks
from tests.planner.jobs import BASE
from tests.save_policy import save_policy

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, "deepseek_v3", make_tokenizer(["apples"]), num_hidden_layers=2)
    return folder


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_as_a_device(monkeypatch)


def answer_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build policies as on a GPU."""
    answers = SimpleNamespace(on_cuda=lambda: True, megatron_fields=platform.megatron_fields)
    monkeypatch.setattr(megatron_config, "platform", answers)
    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda *_: True)
    monkeypatch.setattr(policy_module, "build_optimizer", build_beside_device_buffers)


def build_beside_device_buffers(*arguments: Any) -> Any:
    """Build an optimizer while DDP's buffers are device memory and all else is the host's.

    On a CPU Megatron's modules read `is_cpu` for `is_cuda` (platform/import_hook.py).
    """

    def on_device(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in addresses

    chunks = arguments[-1]
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    addresses = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", property(on_device), raising=False)
        return build_optimizer(*arguments)


def make_policy(
    model: Path, parallel: Parallel, offload: str, clip: float = 0.5, in_fp32: bool = True, expert: int = 1
) -> Policy:
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": clip, "warmup_updates": 2, "offload": offload}
    megatron_args = {"grad_reduce_in_fp32": in_fp32}
    settings: dict[str, Any] = {"model": {"path": model}, "optimizer": optimizer, "layout": {"expert": expert}}
    settings["training"] = {"megatron_args": megatron_args}
    return Policy(check_settings(BASE | settings, "test"), parallel, with_reference=False)


def update(policy: Policy, number: int) -> float:
    """Update with a gradient that follows from the number; return its norm."""
    generator = torch.Generator().manual_seed(number)
    for param in policy.chunks[0].parameters():
        param.main_grad.copy_(torch.randn(param.shape, generator=generator) * (number + 1))
    success, norm, _ = policy.optimizer.step()
    policy.lr_scheduler.step(1)
    assert success
    return float(norm)


def state_of(policy: Policy) -> dict[Any, torch.Tensor]:
    """Return weights, main weights and moments."""
    return {chunk.index: chunk.tensor.clone() for chunk in optimizer_chunks(policy)} | {
        name: tensor.detach().clone() for name, tensor in policy.tensors.items()
    }


def unequal(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> list[Any]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def steps_of(policy: Policy) -> set[float]:
    parts = [sub for part in policy.optimizer.chained_optimizers for sub in part.optimizer.sub_optimizers]
    return {float(state["step"]) for part in parts for state in part.state.values()}


@pytest.mark.parametrize(("clip", "in_fp32"), [(0.5, True), (0.0, False)], ids=["float32", "bfloat16"])
def test_updates_equal_those_of_the_optimizer_on_the_device(
    device: None, model: Path, parallel: Parallel, clip: float, in_fp32: bool
) -> None:
    """Both update by torch's AdamW here. Gradients in bfloat16 are clipped, and measured here, in bfloat16."""
    on_device = make_policy(model, parallel, "step", clip, in_fp32)
    on_host = make_policy(model, parallel, "host", clip, in_fp32)
    parts = [part.optimizer for part in on_host.optimizer.chained_optimizers]
    assert all(isinstance(adam, HybridDeviceOptimizer) and adam.gpu_optimizer is None for adam in parts)
    assert unequal(state_of(on_device), state_of(on_host)) == []
    before = state_of(on_host)
    for number in range(4):
        norm = update(on_device, number)
        assert update(on_host, number) == (norm if in_fp32 else pytest.approx(norm, rel=2**-8))
        assert unequal(state_of(on_device), state_of(on_host)) == []
    unchanged = before.keys() - unequal(before, state_of(on_host))
    assert all("expert_bias" in name for name in unchanged)  # has no gradient


def test_a_resumed_run_updates_as_the_one_that_went_on(
    device: None, model: Path, parallel: Parallel, tmp_path: Path
) -> None:
    policy = make_policy(model, parallel, "host")
    for number in range(3):
        update(policy, number)
    save_policy(policy, tmp_path)
    update(policy, 3)
    resumed = make_policy(model, parallel, "host")
    load_policy(resumed, tmp_path)
    assert steps_of(resumed) == {3.0}
    update(resumed, 3)
    assert unequal(state_of(resumed), state_of(policy)) == []


@pytest.mark.parametrize(("before", "after"), [("step", "host"), ("host", "step")])
def test_a_run_may_be_resumed_with_the_optimizer_elsewhere(
    device: None, model: Path, parallel: Parallel, tmp_path: Path, before: str, after: str
) -> None:
    policy = make_policy(model, parallel, before)
    for number in range(3):
        update(policy, number)
    save_policy(policy, tmp_path)
    update(policy, 3)
    resumed = make_policy(model, parallel, after)
    load_policy(resumed, tmp_path)
    update(resumed, 3)
    assert unequal(state_of(resumed), state_of(policy)) == []


def test_a_checkpoint_is_possible_before_the_first_update(
    device: None, model: Path, parallel: Parallel, tmp_path: Path
) -> None:
    policy = make_policy(model, parallel, "host")
    save_policy(policy, tmp_path)
    weights = state_of(policy)
    load_policy(policy, tmp_path)
    assert unequal(state_of(policy), weights) == []
    assert steps_of(policy) == {0.0}


def test_on_a_cpu_the_state_is_on_the_host_anyway(model: Path, parallel: Parallel) -> None:
    policy = make_policy(model, parallel, "host")
    assert not any(isinstance(part.optimizer, HybridDeviceOptimizer) for part in policy.optimizer.chained_optimizers)
    assert device_items(policy)["optimizer"] > 0


def test_main_weights_and_gradients_are_in_one_pinned_buffer(device: None, model: Path, parallel: Parallel) -> None:
    policy = make_policy(model, parallel, "host")
    update(policy, 0)
    for part in policy.optimizer.chained_optimizers:
        adam = part.optimizer
        places = {tensor.data_ptr() for tensor in adam.pinned.tensors}
        for param, state in adam.state.items():
            main_weight = state["master_param"]
            assert {main_weight.data_ptr(), adam.cpu_copy_map_grad[main_weight].data_ptr()} <= places
            assert torch.equal(main_weight.grad, param.decoupled_grad)
            assert torch.equal(main_weight.to(param.dtype), param)


@pytest.mark.slow
def test_sharded_updates_equal_those_of_the_optimizer_on_the_device(model: Path, tmp_path: Path) -> None:
    """On two ranks: dense weights are sharded, experts divided, each kind with an optimizer of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "tests.policy.host_adam_on_ranks", str(model), str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result == {"parts": 2, "unequal": [], "unequal_after_resume": []}
