"""Resource use of one GPU for the weight sync, the check after it, and the sleep and wake-up of engines."""

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import EngineMemory
from grpo_mp.planner.generation import prefill_flops
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.resource_use import ResourceUse
from grpo_mp.planner.training_use import lone_pass_use
from grpo_mp.planner.weight_traffic import check_lengths, sync_traffic

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

    All ranks take part in every round, so the busiest rank of each round sets the round's time;
    `OVERHEADS.sync_unevenness` scales link bytes accordingly. Quantization needs no such factor, because it overlaps
    with sending the preceding round.
    """
    traffic = sync_traffic(job)
    uneven = OVERHEADS.sync_unevenness
    shared = job.settings.shares_devices
    requests = SYNC_REQUESTS + traffic.rounds + (1 if shared else PAUSE_REQUESTS)
    quantized = (QUANTIZED_ELEMENT_BYTES + job.per_parameter.weights) * traffic.quantized
    latency_s = requests * OVERHEADS.engine_request_s + shared * OVERHEADS.engine_memory_s
    latency_s += ROUND_COLLECTIVES * traffic.rounds * OVERHEADS.host_collective_s
    latency_s += traffic.tensors * OVERHEADS.sync_tensor_s
    return ResourceUse(
        device_bytes=4 * traffic.loaded + quantized,  # each loaded byte is packed, joined, shared and loaded
        nvlink_bytes=uneven * traffic.nvlink,
        network_bytes=uneven * traffic.network,
        latency_s=latency_s,
    )


def check_use(job: PlannedJob, engine: EngineMemory) -> ResourceUse:
    """Return the resource use of one GPU in the check after a sync.

    The policy scores a few sequences, then the engines do. Engine FLOPs count at the achievable rate of the policy.
    """
    lengths, shared = check_lengths(job), job.settings.shares_devices
    tokens, idle_replicas = sum(lengths), max(1.0, job.engine_parallelism.replicas / len(lengths))
    latency_s = job.model.num_layers * OVERHEADS.eager_layer_s + CHECK_COLLECTIVES * OVERHEADS.host_collective_s
    latency_s += (1 + shared) * OVERHEADS.engine_request_s + shared * OVERHEADS.engine_memory_s
    flops = prefill_flops(job, tokens) * idle_replicas
    scored = ResourceUse(flops=flops, device_bytes=engine.weights, latency_s=latency_s)
    return lone_pass_use(job, tokens, job.prompt_tokens) + scored


def sleep_use(job: PlannedJob) -> ResourceUse:
    """Return the resource use of putting engines to sleep, which releases weights and KV caches for the policy."""
    seconds = SLEEP_REQUESTS * OVERHEADS.engine_request_s + 2 * OVERHEADS.engine_memory_s
    return ResourceUse(latency_s=job.offloads * seconds)


def save_moves_use(job: PlannedJob, weights: float, communicators: float) -> ResourceUse:
    """Return the resource use of moving the trainer onto the GPU for a save, and off again.

    Engines keep their weights and release their KV caches. `weights`, `communicators`: bytes on one GPU.
    """
    latency_s = CACHE_REQUESTS * OVERHEADS.engine_request_s + 2 * OVERHEADS.engine_memory_s
    moves = ResourceUse(host_link_bytes=2 * (weights + communicators), latency_s=latency_s)
    return moves.scaled(job.offloads)
