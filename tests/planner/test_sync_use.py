"""What a sync and a save take beside what is sent and written, by name, against numbers made by hand."""

import pytest

from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import Plan, make_plan
from grpo_mp.planner.weight_traffic import sync_traffic
from grpo_mp.utils.phases import GIB
from tests.planner.jobs import job_of
from tests.planner.test_divided_jobs import QWEN, divided

MOVES = "the trainer comes back and leaves"


def named_seconds(plan: Plan, sub_phase: SubPhase) -> dict[str, float]:
    """Seconds of the terms that begin with a name."""
    seconds: dict[str, float] = {}
    for term in plan.times[sub_phase].terms:
        name, colon, _ = term.what.partition(": ")
        if colon:
            seconds[name] = seconds.get(name, 0.0) + term.expected_s
    return seconds


def test_what_is_quantized_takes_time_by_its_own_name() -> None:
    """Of a mixture that one GPU holds and sends: 33 bytes of memory traffic for each of its elements in FP8."""
    plans = [
        make_plan(job_of("qwen3-30b-a3b", "h200-141", 1, layout={"expert": 8}, engine={"args": args}))
        for args in ({"quantization": "fp8"}, {})
    ]
    rate = plans[0].job.cluster.device_memory_gb_s * 1e9 * plans[0].job.cluster.achievable.device_memory
    quantized = sync_traffic(plans[0].job).quantized
    assert quantized > 0
    assert named_seconds(plans[0], SubPhase.SYNC) == {"FP8 quantization": pytest.approx(33 * quantized / rate)}
    assert named_seconds(plans[1], SubPhase.SYNC) == {}


def test_a_save_brings_weights_and_communicators_back_and_the_engine_gives_up_its_cache() -> None:
    """Of one node: WORLD, the gradient's norm and data parallelism, of which a tenth stays."""
    plan = make_plan(job_of("qwen2.5-7b", "h100-80", 1))
    (part,) = plan.uses[SubPhase.SAVE].parts
    communicators = 3 * 0.9 * 0.56 * GIB
    assert part.use.host_link_bytes == pytest.approx(2 * (QWEN * 2 + communicators))
    link = plan.job.cluster.host_link_gb_s * 1e9 * plan.job.cluster.achievable.link
    assert named_seconds(plan, SubPhase.SAVE) == {
        MOVES: pytest.approx(2 * (QWEN * 2 + communicators) / link + 3 * 0.02 + 2 * 0.2)
    }
    moved = plan.uses[SubPhase.OFFLOAD].host_link_bytes
    assert moved == pytest.approx(2 * (QWEN * 2 + QWEN * 12 / 8 + communicators))
    assert named_seconds(make_plan(divided()), SubPhase.SAVE) == {}
