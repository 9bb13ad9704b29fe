"""Resource use of one GPU of an engine: generation, the weight sync and the check after it, sleep and wake-up."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf
from random import Random
from statistics import fmean

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import (
    EngineMemory,
    bytes_per_element,
    engine_rules,
    indexer_token_bytes,
    is_quantized,
    state_bytes,
)
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import rule_parameters
from grpo_mp.planner.resource_use import (
    GIGA,
    TERA,
    ResourceUse,
    active_parameters,
    forward_flops_per_token,
    routed_parameters,
)
from grpo_mp.rollout.engine_layout import REPLICATING_A2A_BACKENDS
from grpo_mp.weight_sync.compare import MAX_TEXTS, comparison_sequences
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY
from grpo_mp.weight_sync.wire import BUCKET_BYTES

MOMENTS = 256  # points in a rollout at which the batch size is sampled


@dataclass(frozen=True)
class Rollout:
    """`decode_steps` until all responses are complete, and the batch size at evenly spaced points in time."""

    decode_steps: int
    batches: tuple[int, ...]


@lru_cache(maxsize=256)
def simulate_rollout(responses: Sequence[int], slots: int) -> Rollout:
    """Simulate the continuous batching of one engine.

    `responses`: lengths [tokens], started in a fixed random order. `slots`: largest number of concurrent sequences; a
    finished response frees its slot for the next one.
    """
    order = list(responses)
    ends = [0] * min(slots, len(responses))
    Random(0).shuffle(order)
    starts = []
    finished = []
    for length in order:
        start = heapq.heappop(ends)
        starts.append(start)
        finished.append(start + length)
        heapq.heappush(ends, start + length)
    starts.sort()
    finished.sort()
    moments = [(moment + 0.5) / MOMENTS * finished[-1] for moment in range(MOMENTS)]
    batches = tuple(bisect_right(starts, moment) - bisect_right(finished, moment) for moment in moments)
    return Rollout(finished[-1], batches)


def samples_per_engine(job: PlannedJob) -> int:
    """Return the samples of a step that one engine generates."""
    return max(1, round(job.settings.samples_per_step / job.num_engines))


def running_sequences(job: PlannedJob, engine: EngineMemory) -> float:
    """Return the largest number of concurrent sequences of one engine, which settings and the caches limit."""
    groups = job.settings.engine.concurrent_groups
    in_flight = inf if groups == "auto" else groups * job.settings.rollout.group_size
    limit = float(job.settings.engine.args.get("max_running_requests") or in_flight)
    cached = engine.kv_cache_tokens / job.mean_seq_len
    if job.model.linear:
        cached = min(cached, engine.state_sequences)
    return min(samples_per_engine(job), max(1.0, min(in_flight, limit, cached)))


def accepted_tokens(job: PlannedJob) -> float:
    """Return the mean number of tokens that a decode step yields for a sequence.

    A draft token of the multi-token-prediction layer is accepted with the assumed probability p if all before it were:
    1 + p + p^2 + ...; n-gram drafts are assumed to be rejected.
    """
    config = job.settings.engine.speculative
    drafts = min(config.num_steps + 1, config.verified_tokens) if config.drafts_by_mtp else 1
    return sum(OVERHEADS.draft_acceptance**place for place in range(drafts))


def generation_use(job: PlannedJob, engine: EngineMemory) -> ResourceUse:
    """Return the resource use of one GPU of an engine: prefill of its prompts and all decode steps, with drafting."""
    model = job.model
    parallelism = job.engine_parallelism
    config = job.settings.engine.speculative
    samples = samples_per_engine(job)
    accepted = accepted_tokens(job)
    # Each decode step reads and writes the states of linear attention.
    state_traffic = 2 * state_bytes(job) * samples * job.mean_response_tokens / accepted / parallelism.replicas
    responses = job.responses(samples)
    steps = tuple(ceil(length / accepted) for length in responses)
    rollout = simulate_rollout(steps, int(running_sequences(job, engine)))
    # Tokens that decode steps read, summed over steps and layers.
    limited_layers, limit = model.limited_attention
    context = sum(cached_tokens(job.prompt_tokens, length) for length in responses)
    limited = limited_layers * sum(cached_tokens(job.prompt_tokens, length, limit) for length in responses)
    cached = limited + (model.num_attention_layers - limited_layers) * context
    index_traffic = context * indexer_token_bytes(model) / accepted / parallelism.replicas
    tokens = samples * job.mean_response_tokens * config.verified_tokens / accepted / parallelism.gpus
    # 3 bytes per element: tokens are dispatched in FP8 and combined in bfloat16.
    all_to_all = model.experts_per_token * model.hidden_size * 3 * model.num_moe_layers * tokens
    to_other_nodes = max(0.0, 1 - job.gpus_per_node / parallelism.expert)
    all_reduce = 4 * model.num_layers * model.hidden_size * tokens * parallelism.attention_tensor
    layers = rollout.decode_steps * model.num_layers
    collectives = 2 * layers * (parallelism.gpus > 1)
    decoding = ResourceUse(
        # Decode attention is counted in device_bytes: its kernels overlap products with reading the cache.
        flops=tokens * forward_flops_per_token(model, job.hf, 0),
        device_bytes=_weight_bytes(job, engine, rollout)
        + _attention_bytes(job, engine, cached / accepted)
        + state_traffic
        + index_traffic,
        nvlink_bytes=all_reduce * (parallelism.attention_tensor > 1)
        + all_to_all * (1 - to_other_nodes) * (parallelism.expert > 1),
        network_bytes=all_to_all * to_other_nodes,
        latency_s=layers * OVERHEADS.decode_layer_s + collectives * _collective_s(job),
    )
    # A draft token costs 1 / num_layers of a step; an n-gram draft is free.
    decoding = decoding.scaled(1 + config.num_steps * config.drafts_by_mtp / model.num_layers)
    prompt_tokens = samples / job.settings.rollout.group_size * job.prompt_tokens
    flops = decoding.flops + prefill_flops(job, prompt_tokens)
    in_fp8 = job.engine_format and job.engine_format.precision == "fp8"
    return replace(decoding, flops=0.0, fp8_flops=flops) if in_fp8 else replace(decoding, flops=flops)


def cached_tokens(prompt: int, response: int, window: float = inf) -> float:
    """Return the tokens that the decode steps of a response read in one layer: min(context, window) in each step."""
    growing = min(max(0.0, window - prompt), response)
    return prompt * growing + growing**2 / 2 + (window * (response - growing) if growing < response else 0.0)


def prefill_flops(job: PlannedJob, tokens: float) -> float:
    """Return the FLOPs of one GPU of an engine for prefilling `tokens` prompt tokens."""
    per_token = forward_flops_per_token(job.model, job.hf, job.prompt_tokens)
    return tokens / job.engine_parallelism.gpus * per_token


def _collective_s(job: PlannedJob) -> float:
    engine = job.settings.engine
    by_nccl = engine.args.get("moe_a2a_backend") not in REPLICATING_A2A_BACKENDS
    over_nodes = engine.gpus_per_engine > job.gpus_per_node
    return OVERHEADS.network_collective_s if by_nccl and over_nodes else OVERHEADS.decode_collective_s


def _weight_bytes(job: PlannedJob, engine: EngineMemory, rollout: Rollout) -> float:
    """Return the bytes of weights that one GPU reads in all decode steps. Small batches leave some experts unread."""
    model = job.model
    if not model.num_experts:
        return rollout.decode_steps * engine.weights
    verified_tokens = job.settings.engine.speculative.verified_tokens
    unused = fmean(
        (1 - model.experts_per_token / model.num_experts) ** (batch * verified_tokens) for batch in rollout.batches
    )
    routed = routed_parameters(model, model.num_experts)
    rest = active_parameters(model, job.hf) - routed_parameters(model, model.experts_per_token)
    routed_share = routed / (routed + rest)
    return rollout.decode_steps * engine.weights * (1 - routed_share * unused)


def _attention_bytes(job: PlannedJob, engine: EngineMemory, cached: float) -> float:
    """Return the bytes of KV cache that one GPU reads in all decode steps. `cached`: tokens, summed over layers.

    Where the attention products take longer than reading, return as many bytes as could be read in that time. This
    happens with latent attention, where all heads of the GPU use the same cache elements.
    """
    model = job.model
    cluster = job.cluster
    parallelism = job.engine_parallelism
    width = 2 * model.mla_cache_dim if model.mla_cache_dim else model.qk_head_dim + model.v_head_dim
    heads = max(1.0, model.num_heads / parallelism.attention_tensor)
    flops = 2 * heads * width
    matmul_bytes_per_flop = (cluster.device_memory_gb_s * GIGA * cluster.achievable.device_memory) / (
        cluster.bf16_tflops * TERA * cluster.achievable.matmul
    )
    return cached / parallelism.replicas * max(engine.layer_token_bytes, flops * matmul_bytes_per_flop)


SYNC_REQUESTS = 4  # begin and end the update, empty the cache, set the version
PAUSE_REQUESTS = 2  # pause and continue generation, on engines with their own GPUs
ROUND_COLLECTIVES = 2  # a gather of the tensors to load, and a barrier until the node's engines have loaded them
SLEEP_REQUESTS = 4  # flush the cache and release memory: of weights, and of the KV cache
CACHE_REQUESTS = 3  # flush the KV cache, release its memory, take the memory back
# Memory traffic per element quantized on a GPU, by engine.args.quantization, without the read of the source.
# FP8 (models/fp8.py): write float32 (4), read for the maximum (4), divide (8), clamp (8), cast (5), copy into the
# message (2); MXFP8 clamps nothing. INT4 (compressed-tensors): extremes (2), divide, round and clamp (12), cast to int8
# and int32 (8), add 8 (8), shift (8), add up the words (17), copy (1).
QUANTIZED_ELEMENT_BYTES = {"fp8": 31, "mxfp8": 23, "compressed-tensors": 56}
CHECK_COLLECTIVES = 6  # gather, broadcast (twice) and compare logprobs; barriers before and after the engine wakes


def sync_use(job: PlannedJob) -> ResourceUse:
    """Return the resource use of one GPU in a weight sync.

    A GPU loads full tensors, but only its own experts or slices of experts. What is sent to a node is divided over its
    GPUs. All ranks take part in every round, so `OVERHEADS.sync_unevenness` scales link bytes to the busiest rank.
    """
    engine = job.engine_parallelism
    per_node = min(job.gpus_per_node, job.world_size)
    expert = 1 if engine.moves_experts else engine.expert
    loaded = received = tensors = 0.0
    for rule in engine_rules(job, with_draft=job.hf.trains_mtp and job.settings.engine.speculative.drafts_by_mtp):
        layers = len(rule.layers or (0,))
        experts = max(1, rule.experts // expert)
        size = layers * rule_parameters(rule, 1, expert, 1).total * bytes_per_element(job, rule)
        divided = engine.expert_tensor if rule.experts else 1
        loaded += size / divided
        received += size / divided * (min(engine.gpus, per_node) if rule.experts else 1) / per_node
        tensors += layers * experts * len(rule.shapes) * (1 + is_quantized(job, rule))

    rounds = ceil(max(loaded, received) / sync_round_bytes(job))
    shared = job.settings.shares_devices
    moves = job.world_size > 1
    requests = SYNC_REQUESTS + rounds + (1 if shared else PAUSE_REQUESTS)
    latency_s = requests * OVERHEADS.engine_request_s + shared * OVERHEADS.engine_memory_s
    latency_s += ROUND_COLLECTIVES * rounds * OVERHEADS.host_collective_s + tensors * OVERHEADS.sync_tensor_s
    form = job.engine_format
    stage = job.parameter_counts[job.largest_stage]
    quantized = (stage.expert if form.experts_only else stage.total) if form else 0
    traffic = QUANTIZED_ELEMENT_BYTES[form.name] + job.per_parameter.weights if form else 0
    return ResourceUse(
        # Each loaded byte is packed, joined, shared and loaded.
        device_bytes=4 * loaded + quantized * traffic,
        nvlink_bytes=OVERHEADS.sync_unevenness * loaded * moves,
        network_bytes=OVERHEADS.sync_unevenness * received * (job.nodes > 1),
        latency_s=latency_s,
    )


def sync_round_bytes(job: PlannedJob) -> float:
    """Return the bytes of a sync round: the share of the bucket, or the largest request that an engine loads."""
    model = job.model
    row = job.model.hidden_size * job.per_parameter.weights
    # The engine gets an expert's slice within a tensor of the full expert's size, from which its loader cuts it.
    expert = model.moe_ffn_hidden_size * row if job.engine_parallelism.expert_tensor > 1 else 0
    # An engine loads each of these tensors in one request.
    largest = max(model.vocab_size, 2 * model.ffn_hidden_size, 3 * model.moe_ffn_hidden_size) * row
    return max((job.settings.sync.bucket_bytes or BUCKET_BYTES) / ROUNDS_IN_MEMORY, largest) + expert


def check_lengths(job: PlannedJob) -> list[int]:
    """Return the lengths [tokens] of the sequences that the check after a sync scores."""
    prompts = [(0,) * max(2, job.prompt_tokens)] * MAX_TEXTS
    longest = job.settings.rollout.max_sequence_tokens
    return list(map(len, comparison_sequences(prompts, longest)))


def check_use(job: PlannedJob, engine: EngineMemory) -> ResourceUse:
    """Return the resource use of one GPU in the check after a sync: the policy and the engines score sequences.

    All replicas of the policy compute the same sequences, one pipeline stage after the other.
    """
    lengths = check_lengths(job)
    shared = job.settings.shares_devices
    layout = job.settings.layout
    tokens = sum(lengths)
    idle_replicas = max(1.0, job.engine_parallelism.replicas / len(lengths))
    by_policy = tokens / layout.tensor / layout.context
    by_policy *= forward_flops_per_token(job.model, job.hf, job.prompt_tokens)
    latency_s = 2 * job.model.num_layers * OVERHEADS.eager_layer_s + CHECK_COLLECTIVES * OVERHEADS.host_collective_s
    latency_s += (1 + shared) * OVERHEADS.engine_request_s + shared * OVERHEADS.engine_memory_s
    return ResourceUse(
        flops=by_policy + prefill_flops(job, tokens) * idle_replicas,
        device_bytes=sum(job.weight_bytes) + engine.weights,
        latency_s=latency_s,
    )


def sleep_use(job: PlannedJob) -> ResourceUse:
    """Return the resource use of putting engines to sleep, which releases weights and KV caches for the policy."""
    seconds = SLEEP_REQUESTS * OVERHEADS.engine_request_s + 2 * OVERHEADS.engine_memory_s
    return ResourceUse(latency_s=job.offloads * seconds)


def save_moves_use(job: PlannedJob, moved: float) -> ResourceUse:
    """Return the resource use of moving `moved` bytes of the trainer onto the GPU for a save, and off again.

    Engines keep their weights and release their KV caches.
    """
    latency_s = CACHE_REQUESTS * OVERHEADS.engine_request_s + 2 * OVERHEADS.engine_memory_s
    return ResourceUse(host_link_bytes=2 * moved, latency_s=latency_s).scaled(job.offloads)
