"""The plan of sparse attention beside numbers written out by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.models.sparse_attention import INDEXER_LOSS
from grpo_mp.planner.activations import activation_bytes, forward_bytes, layer_bytes
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.engine_memory import engine_memory
from grpo_mp.planner.engine_use import generation_use, samples_per_engine
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase, plan_memory
from grpo_mp.planner.model_configs import named_config
from grpo_mp.planner.parameter_count import local_parameter_counts
from grpo_mp.planner.resource_use import (
    active_parameters,
    forward_flops_per_token,
    indexer_flops_per_token,
    logprob_use,
    mtp_flops_per_token,
    train_use,
)
from grpo_mp.utils.errors import UserError
from tests.planner.jobs import settings_of

TOPK = 2048
WITH_INDEXER = [0, 1, *range(2, 78, 4)]  # layers of GLM-5.2
ENGINE = {"gpus_per_engine": 32, "args": {"ep_size": 32, "attn_dp_size": 32}}


REPLAY_KEYS = {"router_replay": "R3_keys"}
STAGES = "Et*18|t*20|t*20|t*20L"
CONTEXT = 2


def job_of(name: str, stages: str | None = None, context: int = 1, **engine: object) -> PlannedJob:
    layout = {"tensor": 8, "pipeline": 4, "expert": 32, "context": context}
    megatron = {"pipeline_model_parallel_layout": stages} if stages else {"num_layers_in_last_pipeline_stage": 13}
    args = ENGINE["args"] | engine  # type: ignore[operator]
    settings = settings_of(layout=layout, engine=ENGINE | {"args": args}, training={"megatron_args": megatron})
    return make_job(settings, named_config(name), read_cluster("h200-141"), 16)


@pytest.mark.parametrize(("name", "size", "active"), [("GLM-5", 744e9, 40e9), ("DeepSeek-V3.2", 671e9, 37e9)])
def test_parameters_are_as_published(name: str, size: float, active: float) -> None:
    job = job_of(name, "Et*19|t*19|t*20|t*20L" if name == "GLM-5" else None)
    layers = tuple(range(job.model.num_layers))
    (count,) = local_parameter_counts(job.hf, LayoutConfig(), (layers,))
    assert count.total == pytest.approx(size, rel=3e-3)
    assert active_parameters(job.model, job.hf) == pytest.approx(active, rel=0.025)


def test_indexers_are_not_trained() -> None:
    """Per indexer: queries of 32 heads of 128 from 2,048, keys from 6,144, weights of heads, a norm."""
    job = job_of("GLM-5.2", STAGES)
    size = 32 * 128 * 2048 + 128 * 6144 + 32 * 6144 + 2 * 128
    frozen = [
        all_.total - trained.total
        for all_, trained in zip(job.parameter_counts, job.policy_trained_counts, strict=True)
    ]
    bounds = [0, 18, 38, 58, 78]
    expected = [sum(start <= layer < end for layer in WITH_INDEXER) for start, end in pairwise(bounds)]
    assert frozen == [count * size for count in expected]


def test_attention_is_computed_for_chosen_keys_and_indexers_for_all() -> None:
    """64 heads multiply 512 + 64 elements of a key, and the plan counts as many of its value; 32 of an indexer 128."""
    job = job_of("GLM-5.2", STAGES)
    dense = forward_flops_per_token(job.model, job.hf, 0)
    for length in (1000, 20_000):
        contexts = range(1, length + 1)
        chosen = sum(min(context, TOPK) for context in contexts) / length
        attention = 2 * 78 * 64 * (512 + 64 + 512 + 64) * chosen
        indexers = 2 * len(WITH_INDEXER) * 32 * 128 * sum(contexts) / length
        flops = forward_flops_per_token(job.model, job.hf, length) - dense
        assert flops == pytest.approx(attention + indexers, rel=0.01)


def test_engines_cache_latents_and_keys_of_indexers() -> None:
    """An indexer's key of 128 is in FP8 with a float32 scale; a latent in FP8 has four blocks with scales."""
    keys = len(WITH_INDEXER) * (128 + 4)
    stages = STAGES
    assert engine_memory(job_of("GLM-5.2", stages)).bytes_per_token == 78 * (512 + 64) * 2 + keys
    in_fp8 = job_of("GLM-5.2", stages, kv_cache_dtype="fp8_e4m3")
    assert engine_memory(in_fp8).bytes_per_token == 78 * (512 + 4 * 4 + 64 * 2) + keys


def test_decode_steps_read_chosen_latents_and_all_keys_of_indexers() -> None:
    job = job_of("GLM-5.2", STAGES)
    one_head = replace(job.model, num_heads=1)  # so that reading takes longer than the products
    engine = engine_memory(job)

    def read(topk: int, indexers: int) -> float:
        indexer = replace(job.model.indexer, topk=topk, layers=frozenset(range(indexers)))  # type: ignore[type-var]
        return generation_use(replace(job, model=replace(one_head, indexer=indexer)), engine).device_bytes

    lengths = job.responses(samples_per_engine(job))
    contexts = [job.prompt_tokens + step for length in lengths for step in range(length)]
    replicas = job.engine_parallelism.replicas
    latents = sum(min(context, TOPK) - min(context, 256) for context in contexts) * 78 * (512 + 64) * 2
    assert read(TOPK, 20) - read(256, 20) == pytest.approx(latents / replicas, rel=0.01)
    assert read(TOPK, 20) - read(TOPK, 10) == pytest.approx(10 * 132 * sum(contexts) / replicas, rel=0.01)


def with_training(job: PlannedJob, **changes: Any) -> PlannedJob:
    training = job.settings.training.model_copy(update=changes)
    return replace(job, settings=job.settings.model_copy(update={"training": training}))


def with_indexer(job: PlannedJob, **changes: Any) -> PlannedJob:
    return replace(job, model=replace(job.model, indexer=replace(job.model.indexer, **changes)))  # type: ignore[type-var]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("backend", "id_bytes"), [("tilelang", 4), ("none", 8)])
def test_keys_that_layers_share_are_held_until_the_backward_pass(recompute: str, backend: str, id_bytes: int) -> None:
    """Layers 0, 1, 2, 6, 10 and 14 of the first stage choose keys, for 4,096 tokens over two context-parallel ranks."""
    given = job_of("GLM-5.2", STAGES, CONTEXT)
    args = given.settings.training.megatron_args | {"dsa_kernel_backend": backend}
    job = with_training(given, recompute=recompute, megatron_args=args)
    without = with_indexer(job, topk=0)
    held = 6 * TOPK * id_bytes * 4096 / CONTEXT
    in_flight = min(4, job.packing.microbatches)
    assert activation_bytes(job, 0, 0.0) - activation_bytes(without, 0, 0.0) == pytest.approx(in_flight * held)
    assert forward_bytes(job, 0) - forward_bytes(without, 0) == pytest.approx(held)


def test_replayed_keys_and_their_buffers_are_counted() -> None:
    """Of GLM-5.2's 78 layers 21 choose 2,048 keys for a token, and SGLang's buffers have all layers, in int32."""
    given = with_training(job_of("GLM-5.2", STAGES, CONTEXT), recompute="full", router_replay="R3")
    job = with_training(given, **REPLAY_KEYS)
    before = plan_memory(given)
    after = plan_memory(job)
    tokens = 128 * 8 * job.mean_seq_len
    slots = 8 * after.engine.kv_cache_tokens / 32
    buffer = slots * 78 * TOPK * 4
    of_step = tokens * len(WITH_INDEXER) * TOPK * 4
    host = [plan.host[SubPhase.TRAIN]["replayed choices"] for plan in (before, after)]
    assert host[1] - host[0] == pytest.approx(buffer + of_step * 8 / 128)
    assert after.engine.key_buffer == 8192 * 78 * TOPK * 4
    limited = plan_memory(with_training(job_of("GLM-5.2", STAGES, CONTEXT, max_total_tokens=10_000), **REPLAY_KEYS))
    assert limited.engine.kv_cache_tokens == 32 * 10_000
    assert limited.engine.kv_cache == pytest.approx(10_000 * limited.engine.bytes_per_token)
    assert limited.host[SubPhase.GENERATE]["replayed choices"] >= 8 * 10_000 * 78 * TOPK * 4
    more = 6 * TOPK * 4 * 4096 / CONTEXT  # on the first stage
    assert forward_bytes(job, 0) - forward_bytes(given, 0) == pytest.approx(more)
    # With R3 the largest layer of GLM-5 holds its own keys, and the others hold none in a forward pass.
    each = [with_training(job_of("GLM-5", "Et*19|t*19|t*20|t*20L"), router_replay=of) for of in ("R3", "R3_keys")]
    assert forward_bytes(each[1], 0) - forward_bytes(each[0], 0) == pytest.approx((19 * 8 - 4) * TOPK * 4096)


def test_with_an_indexer_in_each_layer_keys_are_saved_as_activations() -> None:
    stages = "Et*19|t*19|t*20|t*20L"
    job = with_training(job_of("GLM-5", stages), recompute="none")
    saved = [layer_bytes(each, 4).saved for each in (job, with_indexer(job, topk=0))]
    assert saved[0] - saved[1] == pytest.approx(TOPK * 4 * 4096)


def test_trained_indexers_have_gradients_and_a_backward_pass() -> None:
    frozen = job_of("GLM-5.2", STAGES)
    megatron_args = frozen.settings.training.megatron_args | {INDEXER_LOSS: 0.1}
    job = make_job(with_training(frozen, megatron_args=megatron_args).settings, frozen.hf, frozen.cluster, 16)
    assert job.policy_trained_counts == job.parameter_counts
    tokens = 128 * 8 * job.mean_seq_len * job.packing.load_factor / 128
    indexers = indexer_flops_per_token(job.model, job.hf, job.attention_context)
    assert (train_use(job).flops - train_use(frozen).flops) / tokens == pytest.approx(2 * indexers)


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2)])
def test_training_computes_no_backward_pass_of_indexers(recompute: str, forwards: int) -> None:
    """Attention multiplies keys of 576 elements and values of as many: thrice, and its scores once more."""
    job = with_training(job_of("GLM-5.2", STAGES), recompute=recompute)
    length = round(job.attention_context)
    contexts = range(1, length + 1)
    tokens = 128 * 8 * job.mean_seq_len * job.packing.load_factor / 128
    flops = train_use(job).flops
    scores = 2 * len(WITH_INDEXER) * 32 * 128 * sum(contexts) / length
    assert (flops - train_use(with_indexer(job, heads=0)).flops) / tokens == pytest.approx(forwards * scores, rel=0.01)
    more_keys = sum(min(context, TOPK) - min(context, 256) for context in contexts) / length
    products = (2 + forwards) * 2 * (576 + 576) + 2 * 576
    expected = 78 * 64 * products * more_keys
    assert (flops - train_use(with_indexer(job, topk=256)).flops) / tokens == pytest.approx(expected, rel=0.01)


def test_a_layer_that_predicts_ahead_has_sparse_attention() -> None:
    job = job_of("GLM-5.2", STAGES)
    hf = replace(job.hf, trains_mtp=True)
    length = 20_000
    contexts = range(1, length + 1)
    attention = 2 * 64 * (576 + 576) * sum(min(context, TOPK) for context in contexts) / length
    scores = 2 * 32 * 128 * sum(contexts) / length
    without = mtp_flops_per_token(job.model, hf, 0)
    assert mtp_flops_per_token(job.model, hf, length) - without == pytest.approx(attention + scores, rel=0.01)


def test_context_parallel_ranks_gather_latents_and_keys_of_indexers() -> None:
    """In bfloat16; a backward pass reduces the gradients of the latents, and full recomputation gathers again."""
    job = with_training(job_of("GLM-5.2", STAGES, CONTEXT), recompute="full")
    none = with_indexer(replace(job, model=replace(job.model, mla_cache_dim=0)), head_dim=0)
    tokens = 128 * 8 * job.mean_seq_len * job.packing.load_factor / job.dp_size / CONTEXT
    latents = 78 / 4 * (512 + 64) * 2 * tokens * (CONTEXT - 1)
    keys = len(WITH_INDEXER) / 4 * 128 * 2 * tokens * (CONTEXT - 1)
    forward, training = (
        use(job).network_bytes - use(none).network_bytes for use in (lambda of: logprob_use(of, 1.0), train_use)
    )
    assert forward == pytest.approx(latents + keys)
    assert training == pytest.approx(3 * latents + 2 * keys)


def test_stages_begin_with_a_layer_that_has_an_indexer() -> None:
    with pytest.raises(UserError, match="pipeline stage 1 begins with layer 19, which has no indexer"):
        job_of("GLM-5.2", "Et*19|t*19|t*20|t*20L")
    assert job_of("GLM-5", "Et*19|t*19|t*20|t*20L").model.indexer
