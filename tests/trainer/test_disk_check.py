"""What a run needs of its disk, against what one has written, and on file systems that are really small."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from grpo_mp.checkpoint.run_state import MANIFEST
from grpo_mp.config import load_settings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.parameter_bytes import DiskNeed, disk_need
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.dump import write_groups
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.trainer.disk_check import check_disk
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Prompt, Sample, SampleGroup
from tests.conftest import TinyRun

NEED = DiskNeed(checkpoint=2_000_000, export=500_000, rollouts=0, run=6_500_000)


def test_too_small_for_a_checkpoint_is_refused(small_disk: Callable[[int], Path]) -> None:
    folder = small_disk(1_500_000)
    with pytest.raises(UserError, match=r"bytes free, and a checkpoint takes 2,000,000: make room"):
        list(check_disk(folder / "new" / "run", NEED))
    assert list(folder.iterdir()) == []


def test_too_small_for_the_run_is_a_warning_until_it_has_what_it_keeps(small_disk: Callable[[int], Path]) -> None:
    folder = small_disk(6_000_000)
    (warning,) = check_disk(folder, NEED)
    assert "bytes free, and this run may take 6,500,000: make room" in warning
    checkpoint = folder / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).touch()
    (checkpoint / "weights").write_bytes(bytes(2_000_000))
    (warning,) = check_disk(folder, NEED)
    (checkpoint / "weights").write_bytes(bytes(5_900_000))
    with pytest.raises(UserError):
        list(check_disk(folder, NEED))
    assert list(check_disk(folder, DiskNeed(2_000_000, 0, 0, 5_900_000))) == []


@pytest.mark.parametrize(
    ("settings", "checkpoints", "exports", "rollouts"),
    [
        (("run.save_every=1", "run.steps=9"), 3, 1, 3),
        (("run.save_every=0", "run.steps=9", "run.export=false"), 1, 0, 9),
        (("run.save_every=5", "run.steps=9", "run.export_every=2", "rollout.dump=true"), 2, 5, 9 + 9),
    ],
)
def test_what_a_run_keeps_at_a_time(
    tiny_run: TinyRun, settings: tuple[str, ...], checkpoints: int, exports: int, rollouts: int
) -> None:
    hf = HfConfig.read(tiny_run.model)
    need = disk_need(load_settings(tiny_run.config, list(settings)), hf)
    written = sum(file.stat().st_size for file in tiny_run.model.glob("*.safetensors"))
    assert need.export == pytest.approx(written, rel=0.1)  # with the names of tensors
    assert need.checkpoint == 3 * need.export  # float32 weights and moments
    assert need.run == checkpoints * need.checkpoint + exports * need.export + rollouts * need.rollouts


@pytest.mark.parametrize("replay", ["none", "R3"])
def test_what_a_step_records_is_bounded(tiny_run: TinyRun, tmp_path: Path, replay: str) -> None:
    """Responses of random tokens with random logprobs and experts, as nothing compresses them."""
    hf, random = HfConfig.read(tiny_run.model), np.random.default_rng(0)
    lengths = ("rollout.max_prompt_tokens=8", "rollout.max_response_tokens=5000")
    settings = load_settings(tiny_run.config, [*lengths, f"training.router_replay={replay}"])
    need, shape, groups = disk_need(settings, hf), model_shape(hf), []
    for group_id in range(settings.rollout.prompts_per_step):
        samples = []
        for index in range(settings.rollout.group_size):
            experts = random.integers(0, shape.num_experts, (5000, shape.num_moe_layers, shape.experts_per_token))
            samples.append(
                Sample(
                    *(group_id, index, (1,) * 8, tuple(random.integers(0, 150_000, 5000).tolist())),
                    *(tuple(random.normal(size=5000).tolist()), (3,) * 5000),
                    truncated=True,
                    text="".join(map(chr, random.integers(97, 123, 20_000))),
                    routed_experts=experts.astype(np.uint8) if replay == "R3" else None,
                )
            )
        groups.append(SampleGroup(Prompt(group_id, "?", (1,) * 8), tuple(samples)))
    journal = GroupJournal(tmp_path, 0)
    for number, group in enumerate(groups):
        journal.append(1, number, group, RewardStats(), kept=True)
    write_groups(tmp_path / "dump", groups, {}, "")
    written = [file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()]
    assert need.rollouts * 0.6 < max(written) < need.rollouts
    assert min(written) > 0
