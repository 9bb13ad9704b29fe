"""Resource use of one GPU for the weight sync, the check after it, and the sleep and wake-up of engines."""

from math import ceil

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import EngineMemory, bytes_per_element, engine_rules, is_quantized
from grpo_mp.planner.generation import prefill_flops
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import rule_parameters
from grpo_mp.planner.resource_use import ResourceUse, forward_flops_per_token
from grpo_mp.weight_sync.compare import MAX_TEXTS, comparison_sequences
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY
from grpo_mp.weight_sync.wire import BUCKET_BYTES

SYNC_REQUESTS = 4  # begin and end the update, empty the cache, set the version
PAUSE_REQUESTS = 2  # pause and continue generation, on engines with their own GPUs
ROUND_COLLECTIVES = 2  # a gather of the tensors to load, and a barrier until the node's engines have loaded them
SLEEP_REQUESTS = 4  # flush the cache and release memory: of weights, and of the KV cache
CACHE_REQUESTS = 3  # flush the KV cache, release its memory, take the memory back
# Memory traffic per element quantized to FP8 on a GPU (models/fp8.py), without the read of the source: write float32
# (4), read for the maximum (4), divide (8), clamp (8), cast (5), copy into the message (2).
QUANTIZED_ELEMENT_BYTES = 31
CHECK_COLLECTIVES = 6  # gather, broadcast (twice) and compare logprobs; barriers before and after the engine wakes


def sync_use(job: PlannedJob) -> ResourceUse:
    """Return the resource use of one GPU in a weight sync.

    A GPU loads full tensors, but only its own experts or slices of experts. What is sent to a node is divided over its
    GPUs. All ranks take part in every round, so `OVERHEADS.sync_unevenness` scales link bytes to the busiest rank.
    """
    engine, per_node = job.engine_parallelism, min(job.gpus_per_node, job.world_size)
    expert = 1 if engine.moves_experts else engine.expert
    loaded = received = tensors = 0.0
    for rule in engine_rules(job, with_draft=job.hf.trains_mtp and job.settings.engine.speculative.drafts_by_mtp):
        layers, experts = len(rule.layers or (0,)), max(1, rule.experts // expert)
        size = layers * rule_parameters(rule, 1, expert, 1).total * bytes_per_element(job, rule)
        divided = engine.expert_tensor if rule.experts else 1
        loaded += size / divided
        received += size / divided * (min(engine.gpus, per_node) if rule.experts else 1) / per_node
        tensors += layers * experts * len(rule.shapes) * (1 + is_quantized(job, rule))

    rounds = ceil(max(loaded, received) / sync_round_bytes(job))
    shared, moves = job.settings.shares_devices, job.world_size > 1
    requests = SYNC_REQUESTS + rounds + (1 if shared else PAUSE_REQUESTS)
    latency_s = requests * OVERHEADS.engine_request_s + shared * OVERHEADS.engine_memory_s
    latency_s += ROUND_COLLECTIVES * rounds * OVERHEADS.host_collective_s + tensors * OVERHEADS.sync_tensor_s
    quantized = job.engine_uses_fp8 * job.parameter_counts[job.largest_stage].total
    return ResourceUse(
        # Each loaded byte is packed, joined, shared and loaded.
        device_bytes=4 * loaded + quantized * (QUANTIZED_ELEMENT_BYTES + job.per_parameter.weights),
        nvlink_bytes=OVERHEADS.sync_unevenness * loaded * moves,
        network_bytes=OVERHEADS.sync_unevenness * received * (job.nodes > 1),
        latency_s=latency_s,
    )


def sync_round_bytes(job: PlannedJob) -> float:
    """Return the bytes of a sync round: the share of the bucket, or the largest request that an engine loads."""
    model, row = job.model, job.model.hidden_size * job.per_parameter.weights
    # The engine gets an expert's slice within a tensor of the full expert's size, from which its loader cuts it.
    expert = model.moe_ffn_hidden_size * row if job.engine_parallelism.expert_tensor > 1 else 0
    # An engine loads each of these tensors in one request.
    largest = max(model.vocab_size, 2 * model.ffn_hidden_size, 3 * model.moe_ffn_hidden_size) * row
    return max((job.settings.sync.bucket_bytes or BUCKET_BYTES) / ROUNDS_IN_MEMORY, largest) + expert


def check_lengths(job: PlannedJob) -> list[int]:
    """Return the lengths [tokens] of the sequences that the check after a sync scores."""
    prompts, longest = [(0,) * max(2, job.prompt_tokens)] * MAX_TEXTS, job.settings.rollout.max_sequence_tokens
    return list(map(len, comparison_sequences(prompts, longest)))


def check_use(job: PlannedJob, engine: EngineMemory) -> ResourceUse:
    """Return the resource use of one GPU in the check after a sync: the policy and the engines score sequences.

    All replicas of the policy compute the same sequences, one pipeline stage after the other.
    """
    lengths, shared, layout = check_lengths(job), job.settings.shares_devices, job.settings.layout
    tokens, idle_replicas = sum(lengths), max(1.0, job.engine_parallelism.replicas / len(lengths))
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
