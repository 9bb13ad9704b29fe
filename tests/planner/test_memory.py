"""Memory by kind against numbers computed by hand, residency by phase, and peaks of a process."""

import subprocess
import sys
import weakref
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from grpo_mp.checkpoint.stacked_experts import stack_experts
from grpo_mp.planner.activations import forward_bytes, layer_bytes, logits_bytes
from grpo_mp.planner.memory import MemoryPlan, SubPhase, plan_memory, rotary_table_bytes, stacked_expert_bytes
from tests.planner.jobs import job_of

QWEN = 7_615_616_512  # parameters of Qwen2.5-7B, as its publisher's files hold
PRECISION_AWARE = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


def test_dense_model_on_eight_replicas() -> None:
    memory = plan_memory(job_of("qwen2.5-7b", "h100-80", 1))
    (device,) = memory.device
    train = device[SubPhase.TRAIN]
    assert train["weights"] == QWEN * 2
    assert train["gradients"] == QWEN * 4
    assert train["optimizer"] == QWEN * 12 / 8
    assert memory.host[SubPhase.GENERATE]["weights"] == QWEN * 2 * 8
    assert memory.host[SubPhase.GENERATE]["optimizer"] == QWEN * 12
    # 28 layers of 4 key and 4 value heads of 128 in bfloat16
    assert memory.engine.bytes_per_token == 28 * 2 * 4 * 128 * 2
    assert memory.engine.weights == pytest.approx(QWEN * 2, rel=1e-4)


def test_experts_to_replay_and_those_that_sglang_keeps() -> None:
    """A node of 8 GPUs: a 16th of 1,024 samples, 58 layers of 8 experts in a byte; and 61 in int32 for the cache.

    Until samples are sent, the host of an engine of two nodes has an 8th of them, and with staleness those begun early.
    """
    layout = {"tensor": 8, "expert": 8}
    engine = {"gpus_per_engine": 16, "args": {"quantization": "fp8", "ep_size": 16}}
    replay: dict[str, Any] = {"engine": engine, "layout": layout, "training": {"router_replay": "R3"}}
    job = job_of("deepseek-r1", "h100-80", 16, **replay)
    memory = plan_memory(job)
    partial = plan_memory(job_of("deepseek-r1", "h100-80", 16, rollout={"max_staleness": 2}, **replay))
    in_cache = 8 * memory.engine.kv_cache_tokens * 61 * 8 * 4
    assert in_cache > 0
    step = 1024 * job.mean_seq_len * 58 * 8
    for plan, sub_phase, kept in (
        (memory, SubPhase.SCORE, step / 8 + step / 16),
        (memory, SubPhase.TRAIN, step / 16),
        (partial, SubPhase.GENERATE, 3 * step / 8 + step / 16),
        (partial, SubPhase.SYNC, 2 * step / 8 + step / 16),
    ):
        assert plan.host[sub_phase]["replayed choices"] == pytest.approx(in_cache + kept)


def test_residency_by_phase() -> None:
    (device,) = plan_memory(job_of("qwen2.5-7b", "h100-80", 1)).device
    assert {"engine weights", "KV cache"} <= device[SubPhase.GENERATE].keys()
    assert not {"weights", "gradients", "optimizer"} & device[SubPhase.GENERATE].keys()
    assert not {"engine weights", "KV cache"} & device[SubPhase.TRAIN].keys()
    assert {"weights", "engine weights", "sync rounds"} <= device[SubPhase.SYNC].keys()
    assert "KV cache" not in device[SubPhase.SYNC]


def test_output_head_holds_logits_chunks_and_its_gradient() -> None:
    job = job_of("qwen2.5-7b", "h100-80", 1, layout={"tensor": 4})
    # Of a micro-batch, gathered
    rows = 1024
    columns = 152064 // 4
    hidden = 4096 * 3584 * 2
    assert logits_bytes(job, 0, backward=False) == rows * columns * 10 + hidden
    assert logits_bytes(job, 0, backward=True) == rows * columns * 14 + 2 * hidden + columns * 3584 * 4


@pytest.mark.parametrize("rows", [64, 4096])
def test_activations_of_a_layer_and_of_the_output_head_are_not_there_at_once(rows: int) -> None:
    training = {"max_tokens_per_microbatch": 4096, "logprob_chunk_tokens": rows, "recompute": "full"}
    job = job_of("qwen2.5-7b", "h100-80", 1, training=training)
    (device,) = plan_memory(job).device
    logprob, train = (
        device[phase].get("activations", 0.0) + device[phase]["logits"] for phase in (SubPhase.LOGPROB, SubPhase.TRAIN)
    )
    layer = forward_bytes(job, 0)
    head = logits_bytes(job, 0, backward=False)
    assert (layer > head) == (rows == 64)
    assert logprob == max(layer, head)
    inputs = 28 * 4096 * 3584 * 2
    layer = layer_bytes(job, 0).backward
    head = logits_bytes(job, 0, backward=True)
    assert train == inputs + max(layer, head)


def test_the_optimizer_is_where_the_setting_says() -> None:
    def plan(offload: str) -> MemoryPlan:
        return plan_memory(job_of("qwen2.5-7b", "h100-80", 1, optimizer={"offload": offload}))

    stays = plan("none")
    leaves = plan("step")
    on_host = plan("host")
    with_state = {sub_phase for sub_phase, sizes in stays.device[0].items() if "optimizer" in sizes}
    assert with_state == set(SubPhase) - {SubPhase.START}
    assert "optimizer" not in leaves.device[0][SubPhase.GENERATE]
    assert not any("optimizer" in sizes for sizes in on_host.device[0].values())
    host_bytes = [memory.host[SubPhase.TRAIN].get("optimizer", 0) for memory in (stays, leaves, on_host)]
    assert host_bytes == [0, QWEN * 12, QWEN * 12]
    on_host_when = {sub_phase for sub_phase, sizes in on_host.host.items() if sizes["optimizer"]}
    assert on_host_when == set(SubPhase) - {SubPhase.START}
    pieces = {sub_phase: sizes.get("optimizer pieces", 0) for sub_phase, sizes in on_host.device[0].items()}
    assert {sub_phase: size for sub_phase, size in pieces.items() if size} == {SubPhase.OPTIMIZER: 2 * 2**28}


def test_a_save_and_a_load_need_one_piece_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_mp.planner.memory.PIECE_BYTES", 2**28)
    host = plan_memory(job_of("qwen2.5-7b", "h100-80", 1, training={"megatron_args": PRECISION_AWARE})).host
    sizes = {phase: kinds["checkpoint"] for phase, kinds in host.items() if kinds["checkpoint"]}
    assert sizes == {SubPhase.SAVE: 8 * 2**28, SubPhase.LOAD: 8 * 2**28}


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [(), ("--critic",)])
def test_every_phase_takes_what_is_planned(arguments: tuple[str, ...]) -> None:
    """From 0.95 to 1.02 of it; a save holds a piece beside the state, a load in another layout, too."""
    command = [sys.executable, "-m", "tests.bench.plan_measured", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert result.stdout.count("ratio") == 8


def test_rotary_tables_are_those_that_megatron_keeps() -> None:
    job = job_of("qwen3-8b", "h100-80", 1, rollout={"max_prompt_tokens": 200, "max_response_tokens": 800})
    rotary = RotaryEmbedding(128, rotary_percent=1.0, use_cpu_initialization=True, cp_group=None)
    RotaryEmbedding.forward.cache_clear()
    lengths = range(950, 1001)
    tables = [weakref.ref(rotary(length, packed_seq=True).untyped_storage()) for length in lengths]
    kept = [table().nbytes() for table in tables if table() is not None]
    assert len(kept) < len(lengths)
    assert sum(kept) == pytest.approx(rotary_table_bytes(job, 0), rel=0.03)
    RotaryEmbedding.forward.cache_clear()


def test_an_export_holds_the_stacked_experts_of_a_layer() -> None:
    """Fed with the experts of one layer, without memory; only GPT-OSS is exported so."""
    job = job_of("gpt-oss-20b", "h100-80", 1)
    hf = job.hf
    sizes = {part: (hf.int("intermediate_size"), hf.int("hidden_size")) for part in ("gate", "up")}
    sizes["down"] = hf.int("hidden_size"), hf.int("intermediate_size")
    held = [0]

    def experts() -> Iterator[tuple[str, torch.Tensor]]:
        for expert, (part, shape) in product(range(hf.int("num_local_experts")), sizes.items()):
            held.append(sum(stack.nbytes for stack in stacked.gi_frame.f_locals["stacks"].values()))
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            yield name, torch.empty(shape, dtype=torch.bfloat16, device="meta")

    stacked: Any = stack_experts(experts(), hf.int("num_local_experts"))
    assert len(list(stacked)) == 2
    assert max(held) == stacked_expert_bytes(job)
    assert stacked_expert_bytes(job_of("qwen3-30b-a3b", "h100-80", 1)) == 0
