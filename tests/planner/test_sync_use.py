"""What a sync of changes and a save take beside what is sent and written, by name, against numbers made by hand."""

from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase, plan_memory
from grpo_mp.planner.model_configs import named_config
from grpo_mp.planner.plan import Plan, make_plan
from grpo_mp.planner.weight_traffic import sync_traffic
from grpo_mp.utils.phases import GIB
from tests.planner.jobs import job_of
from tests.planner.test_divided_jobs import QWEN, divided

SENT_ANYWAY = "what did not change is sent, each 5 steps"
CHECKSUMS = "checksums, each 5 steps"
FINGERPRINTS = "fingerprints of weights"
MOVES = "the trainer comes back and leaves"


def named_seconds(plan: Plan, sub_phase: SubPhase) -> dict[str, float]:
    """Seconds of the terms that begin with a name."""
    seconds: dict[str, float] = {}
    for term in plan.times[sub_phase].terms:
        name, colon, _ = term.what.partition(": ")
        if colon:
            seconds[name] = seconds.get(name, 0.0) + term.expected_s
    return seconds


def synced(**sync: Any) -> PlannedJob:
    return divided(sync=sync)


def test_a_check_of_what_a_sync_leaves_out_is_another_sync_and_two_checksums() -> None:
    whole, checked = (make_plan(synced(**sync)) for sync in ({"delta": False}, {"check_delta_every": 5}))
    assert named_seconds(whole, SubPhase.SYNC) == {}
    seconds, sync_s = named_seconds(checked, SubPhase.SYNC), whole.times[SubPhase.SYNC].expected_s
    assert set(seconds) == {FINGERPRINTS, CHECKSUMS, SENT_ANYWAY}
    assert seconds[SENT_ANYWAY] == pytest.approx(sync_s / 5)
    assert checked.times[SubPhase.SYNC].expected_s == pytest.approx(sync_s + sum(seconds.values()))
    # Of the 4 GPUs that divide the policy each has a quarter: five operations read 7 words for one, and write 4.
    rate = checked.job.cluster.device_memory_gb_s * 1e9 * checked.job.cluster.achievable.device_memory
    assert seconds[FINGERPRINTS] == pytest.approx(11 * QWEN / 4 * 2 / rate, rel=1e-3)
    # Two requests of 20 ms, two tensors of 100 us for each that is loaded, and all weights of one of 2 GPUs, twice.
    tensors = next(
        wait.count for wait in whole.uses[SubPhase.SYNC].waits if wait.name == "tensors that an engine loads"
    )
    hashed = 2 * 0.02 + 2 * tensors * 1e-4 + 2 * QWEN / 2 * 2 / rate
    assert seconds[CHECKSUMS] == pytest.approx(hashed / 5, rel=1e-3)


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


def test_nothing_is_checked_where_all_is_sent() -> None:
    never = make_plan(synced(check_delta_every=0))
    assert set(named_seconds(never, SubPhase.SYNC)) == {FINGERPRINTS}
    assert named_seconds(make_plan(job_of("qwen2.5-7b", "h100-80", 1)), SubPhase.SYNC) == {}
    kept = {"args": {"enable_weights_cpu_backup": True}}
    backup = make_plan(job_of("qwen2.5-7b", "h100-80", 1, engine=kept, sync={"check_delta_every": 5}))
    assert set(named_seconds(backup, SubPhase.SYNC)) == {FINGERPRINTS, CHECKSUMS, SENT_ANYWAY}


def test_checksums_of_fp8_need_memory_of_the_device_where_the_engine_is() -> None:
    """12 bytes for each element of 128 experts of 2 x 768 x 2,048, which one GPU of two has half of."""
    fp8 = {"quantization": "fp8", "ep_size": 2}
    engine = {"ranks": 4, "gpus_per_engine": 2, "args": fp8}
    jobs = [
        job_of("qwen3-30b-a3b", "h100-80", 1, schedule="async", layout={"expert": 4}, engine=engine | {"args": args})
        for args in (fp8, {"ep_size": 2})
    ]
    plans = [plan_memory(job) for job in jobs]
    size = 12 * 64 * 2 * 768 * 2048
    assert [plan.engine_device[SubPhase.SYNC]["checksums"] for plan in plans] == [size, 0]
    assert not any("checksums" in sizes for sizes in plans[0].device[0].values())
    assert plans[0].device[0][SubPhase.SYNC]["fingerprints"] == 8 * 2**20  # a chunk's temporary memory is gone before


def test_a_dense_layer_that_is_not_divided_is_the_largest_tensor_that_is_hashed() -> None:
    """R1's first layers have 2 x 18,432 rows of 7,168, whole on each GPU with moe_dense_tp_size 1."""
    divided_r1 = ["schedule=async", "engine.ranks=128", "sync.pause=in_place", "training.router_replay=none"]
    settings = load_settings(Path("configs/moe_671b.yaml"), divided_r1)
    job = make_job(settings, named_config("DeepSeek-R1"), read_cluster("h100-80"), nodes=32)
    sizes = plan_memory(job).engine_device[SubPhase.SYNC]
    assert sizes["checksums"] == 12 * 2 * 18432 * 7168
    assert sizes["quantization"] == 2 * 4 * 2**25


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
