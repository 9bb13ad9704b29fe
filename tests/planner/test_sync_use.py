"""What a sync and a save take beside what is sent and written, by name, against numbers made by hand."""

import pytest

from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.plan import make_plan
from grpo_mp.planner.sync_use import sync_use
from grpo_mp.planner.weight_traffic import sync_traffic
from grpo_mp.utils.phases import GIB
from tests.planner.jobs import job_of
from tests.planner.test_divided_jobs import QWEN, divided


def test_quantization_takes_memory_traffic() -> None:
    """Of a mixture that one GPU holds and sends: 33 bytes for each of its elements in FP8."""
    jobs = [
        job_of("qwen3-30b-a3b", "h200-141", 1, layout={"expert": 8}, engine={"args": args})
        for args in ({"quantization": "fp8"}, {})
    ]
    traffic = [sync_traffic(job) for job in jobs]
    assert traffic[0].quantized > 0 == traffic[1].quantized
    for job, moved in zip(jobs, traffic, strict=True):
        assert sync_use(job).device_bytes == pytest.approx(4 * moved.loaded + 33 * moved.quantized)


def test_a_save_brings_weights_and_communicators_back_and_the_engine_gives_up_its_cache() -> None:
    """Of one node: WORLD, the gradient's norm and data parallelism, of which a tenth stays."""
    plan = make_plan(job_of("qwen2.5-7b", "h100-80", 1))
    communicators = 3 * 0.9 * 0.56 * GIB
    use = plan.uses[SubPhase.SAVE]
    assert use.host_link_bytes == pytest.approx(2 * (QWEN * 2 + communicators))
    assert use.latency_s == pytest.approx(3 * 0.02 + 2 * 0.2)
    moved = plan.uses[SubPhase.OFFLOAD].host_link_bytes
    assert moved == pytest.approx(2 * (QWEN * 2 + QWEN * 12 / 8 + communicators))
    assert make_plan(divided()).uses[SubPhase.SAVE].host_link_bytes == 0
