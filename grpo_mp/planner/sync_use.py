"""What one GPU moves and waits for while engines get new weights, are checked, and sleep and wake."""

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import EngineMemory
from grpo_mp.planner.generation import prefill_flops
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.resource_use import ResourceUse
from grpo_mp.planner.training_use import lone_pass_use
from grpo_mp.planner.weight_traffic import check_lengths, sync_traffic

SYNC_REQUESTS = 4  # begin and end the update, empty the cache, set the version
PAUSE_REQUESTS = 2  # pause and continue what engines of their own are at
ROUND_COLLECTIVES = 2  # the engine's ranks gather what they load, and wait until the engines of the node have it
SLEEP_REQUESTS = 4  # empty the cache and give up memory, of weights and of the cache
CACHE_REQUESTS = 3  # empty the cache, give up its memory, take it back
# Over an element that becomes FP8 on a GPU (models/fp8.py), beside its own bytes: it is made float32 (4), of which the
# largest is read (4); divided and bounded (8 each), cast (5), and copied into the message (2).
QUANTIZED_ELEMENT_BYTES = 31
CHECK_COLLECTIVES = 6  # gather, broadcast (twice) and compare logprobs; barriers before and after the engine wakes


def sync_use(job: PlannedJob) -> ResourceUse:
    """Return the use of one GPU: what the busiest rank sends or receives in rounds that all ranks go through.

    Links are as unevenly used over the rounds as measured. Quantization is not: while a round is sent, the next one is
    quantized.
    """
    traffic, uneven, shared = sync_traffic(job), OVERHEADS.sync_unevenness, job.settings.shares_devices
    requests = SYNC_REQUESTS + traffic.rounds + (1 if shared else PAUSE_REQUESTS)
    quantized = (QUANTIZED_ELEMENT_BYTES + job.per_parameter.weights) * traffic.quantized
    latency_s = requests * OVERHEADS.engine_request_s + shared * OVERHEADS.engine_memory_s
    latency_s += ROUND_COLLECTIVES * traffic.rounds * OVERHEADS.host_collective_s
    latency_s += traffic.tensors * OVERHEADS.sync_tensor_s
    return ResourceUse(
        device_bytes=4 * traffic.loaded + quantized,  # packed, joined, shared, loaded
        nvlink_bytes=uneven * traffic.nvlink,
        network_bytes=uneven * traffic.network,
        latency_s=latency_s,
    )


def check_use(job: PlannedJob, engine: EngineMemory) -> ResourceUse:
    """Return the use of one GPU in the check after a sync: a few sequences, scored by the policy and then by engines.

    The engine's products count at the policy's rate.
    """
    lengths, shared = check_lengths(job), job.settings.shares_devices
    tokens, idle_replicas = sum(lengths), max(1.0, job.engine_parallelism.replicas / len(lengths))
    latency_s = job.model.num_layers * OVERHEADS.eager_layer_s + CHECK_COLLECTIVES * OVERHEADS.host_collective_s
    latency_s += (1 + shared) * OVERHEADS.engine_request_s + shared * OVERHEADS.engine_memory_s
    flops = prefill_flops(job, tokens) * idle_replicas
    scored = ResourceUse(flops=flops, device_bytes=engine.weights, latency_s=latency_s)
    return lone_pass_use(job, tokens, job.prompt_tokens) + scored


def sleep_use(job: PlannedJob) -> ResourceUse:
    """Return the use of engines that give up their weights and caches to the policy."""
    seconds = SLEEP_REQUESTS * OVERHEADS.engine_request_s + 2 * OVERHEADS.engine_memory_s
    return ResourceUse(latency_s=job.offloads * seconds)


def save_moves_use(job: PlannedJob, weights: float, communicators: float) -> ResourceUse:
    """Return the use of a trainer that comes back for a save and leaves again; both sizes are bytes of one GPU.

    Engines keep their weights, and give up their caches.
    """
    latency_s = CACHE_REQUESTS * OVERHEADS.engine_request_s + 2 * OVERHEADS.engine_memory_s
    moves = ResourceUse(host_link_bytes=2 * (weights + communicators), latency_s=latency_s)
    return moves.scaled(job.offloads)
