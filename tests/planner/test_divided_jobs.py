"""Plans of jobs whose engines have GPUs of their own, against what each side alone needs."""

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import SubPhase, plan_memory, total_bytes
from grpo_mp.planner.plan import make_plan
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.phases import GIB
from tests.cli.command import run_command
from tests.planner.jobs import job_of

QWEN = 7_615_616_512  # parameters of Qwen2.5-7B
TENSOR = {"layout": {"tensor": 4}, "engine": {"ranks": 8, "gpus_per_engine": 2}}
HALF_A_NODE = {"ranks": 4, "gpus_per_engine": 2}


def divided(schedule: str = "async", nodes: int = 2, **sections: dict[str, Any]) -> PlannedJob:
    """Put Qwen2.5-7B on 16 GPUs: a trainer of 8 and 4 engines of 2."""
    values: dict[str, Any] = TENSOR | sections
    return job_of("qwen2.5-7b", "h100-80", nodes, schedule=schedule, **values)


def test_a_layout_divides_the_ranks_that_train() -> None:
    job = divided()
    assert (job.world_size, job.train_ranks, job.dp_size, job.num_engines) == (16, 8, 2, 4)
    with pytest.raises(UserError, match="does not divide the 8 ranks"):
        divided(layout={"tensor": 4, "pipeline": 4})
    with pytest.raises(UserError, match="leaves none of the 8 ranks"):
        divided(nodes=1)


def test_a_device_that_trains_holds_all_of_the_trainer_and_no_engine() -> None:
    plan = plan_memory(divided())
    alone = plan_memory(job_of("qwen2.5-7b", "h100-80", 1, layout={"tensor": 4}))
    (device,) = plan.device
    (shared,) = alone.device
    assert not {"engine weights", "KV cache", "CUDA graphs"} & {kind for sizes in device.values() for kind in sizes}
    always = set(device) - {SubPhase.START}
    assert {SubPhase.GENERATE, SubPhase.OFFLOAD}.isdisjoint(always)
    for kind, size in (("weights", 2), ("gradients", 4), ("optimizer", 12 / 2)):  # of 2 data-parallel ranks
        assert {device[sub_phase][kind] for sub_phase in always} == {shared[SubPhase.TRAIN][kind]}
        assert device[SubPhase.SYNC][kind] == pytest.approx(QWEN / 4 * size, rel=1e-3)
    # As when it shares its GPUs, but for the engine's process, its communicators, and a communicator of all ranks.
    rest = total_bytes(shared[SubPhase.TRAIN]) - 0.6 * GIB - 1 * GIB + 0.56 * GIB
    assert total_bytes(device[SubPhase.TRAIN]) == pytest.approx(rest)


@pytest.mark.parametrize(("prompts", "slower"), [(8, "generation"), (256, "training")])
def test_a_step_takes_the_slower_side_and_the_sync(prompts: int, slower: str) -> None:
    rollout = {"prompts_per_step": prompts, "group_size": 4, "max_prompt_tokens": 2048, "max_response_tokens": 2048}
    plan = make_plan(divided("one_step_off", rollout=rollout, run={"folder": "run", "steps": 1, "save_every": 4}))
    times = {sub_phase: sum(time.values()) for sub_phase, time in plan.times.items()}
    trained = (SubPhase.LOGPROB, SubPhase.TRAIN, SubPhase.OPTIMIZER)
    training_s = sum(times[sub_phase] for sub_phase in trained) + times[SubPhase.SAVE] / 4
    sync_s = times[SubPhase.SYNC] + times[SubPhase.CHECK]
    assert plan.sides_s == pytest.approx((times[SubPhase.GENERATE], training_s, sync_s))
    assert (times[SubPhase.GENERATE] > training_s) == (slower == "generation")
    assert plan.step_s == pytest.approx(max(times[SubPhase.GENERATE], training_s) + sync_s)
    assert SubPhase.OFFLOAD not in times


def test_the_command_shows_both_kinds_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[2] / "configs" / "qwen3_30b_a3b.yaml"
    division = ("schedule=async", "engine.ranks=4", "layout.expert=4", "sync.pause=in_place")
    result = run_command(capsys, "plan", str(recipe), "--cluster", "h200-141", *division)
    assert result.status == 0, result.err
    text = " ".join(result.out.split())
    assert "layout: tensor=4, pipeline=1, context=1, expert=4, expert_tensor=1, data=1; " in text
    assert "Device, GiB: a GPU of an engine" in text
    assert "schedule async: a step takes the longer of generation" in text
    # Precision-aware Adam keeps 2 + 4 + 4 bytes of all 7,642,626,048 parameters of a rank: nothing divides them.
    assert re.search(r" train 0\.6 [\d.]+ 14\.2 28\.5 71\.2 ", text)
    assert " offload " not in text
