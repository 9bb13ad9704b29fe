"""What the engines do in a step: sequences in their batches over time, and what decoding them reads and sends."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from random import Random
from statistics import fmean

from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import EngineMemory
from grpo_mp.planner.flops import active_parameters, forward_flops_per_token, routed_parameters
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.resource_use import GIGA, TERA, ResourceUse, Wait
from grpo_mp.planner.speculation import speculation
from grpo_mp.rollout.engine_parallelism import REPLICATING_A2A_BACKENDS

MOMENTS = 256  # of a rollout at which its batch is looked at


@dataclass(frozen=True)
class GenerationPlan:
    """Decoding work of one engine in one step."""

    samples: int
    running_per_replica: float  # the most sequences at a time
    decode_steps: int
    batches: tuple[int, ...]  # sequences that run in the whole engine, at evenly spaced moments


@dataclass(frozen=True)
class Rollout:
    """Decode steps until all responses are there, and the batch at evenly spaced moments of them."""

    decode_steps: int
    batches: tuple[int, ...]


@lru_cache(maxsize=256)
def simulate_rollout(responses: Sequence[int], slots: int) -> Rollout:
    """Decode responses of these lengths, in any order, at most `slots` at a time: a slot that is free takes the next.

    Pure.
    """
    order, ends = list(responses), [0] * min(slots, len(responses))
    Random(0).shuffle(order)
    starts, finished = [], []
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


def plan_generation(job: PlannedJob, engine: EngineMemory) -> GenerationPlan:
    """Decode an engine's share of a step's samples, as many at a time as its settings and its cache allow."""
    samples = max(1, round(job.settings.samples_per_step / job.num_engines))
    running = min(samples, running_limit(job, engine))
    accepted = speculation(job).acceptance_length
    simulated = simulate_rollout(tuple(ceil(length / accepted) for length in job.responses(samples)), int(running))
    return GenerationPlan(samples, running / job.engine_parallelism.replicas, simulated.decode_steps, simulated.batches)


@dataclass(frozen=True)
class DecodeWork:
    """Decode steps of one engine: `batches`, in tokens, of evenly spaced ones, tokens, and those of cache they read."""

    decode_steps: float
    batches: Sequence[float]
    tokens: float
    cached_tokens: float

    def scaled(self, factor: float) -> "DecodeWork":
        """Return as large steps, `factor` times as many."""
        return DecodeWork(self.decode_steps * factor, self.batches, self.tokens * factor, self.cached_tokens * factor)


def running_limit(job: PlannedJob, engine: EngineMemory) -> float:
    """Return the most sequences that an engine runs at a time: by its settings, and by its cache at the mean length."""
    in_flight = job.settings.engine.concurrent_groups * job.settings.rollout.group_size
    limit = float(job.settings.engine.args.get("max_running_requests") or in_flight)
    return max(1.0, min(in_flight, limit, engine.kv_cache_tokens / job.mean_seq_len))


def generation_use(job: PlannedJob, engine: EngineMemory) -> ResourceUse:
    """Return the use of one GPU of an engine: prefill of its prompts, and every decode step with its drafts."""
    plan, prompt, drafts = plan_generation(job, engine), job.prompt_tokens, speculation(job)
    cached_tokens = sum(prompt * length + length**2 / 2 for length in job.responses(plan.samples))
    yields = drafts.acceptance_length
    work = DecodeWork(
        plan.decode_steps,
        [batch * drafts.verified_tokens for batch in plan.batches],
        plan.samples * job.mean_response_tokens * drafts.verified_tokens / yields,
        cached_tokens / yields,
    )
    prefill = ResourceUse(flops=prefill_flops(job, plan.samples / job.settings.rollout.group_size * prompt))
    drafting = decode_use(job, engine, work.scaled(drafts.drafting - 1), "drafts")
    return decode_use(job, engine, work) + drafting + prefill


def prefill_flops(job: PlannedJob, tokens: float) -> float:
    """Return the FLOPs of one GPU of an engine that computes so many tokens of prompts."""
    per_token = forward_flops_per_token(job.model, job.hf, job.prompt_tokens)
    return tokens / job.engine_parallelism.gpus * per_token


def decode_use(job: PlannedJob, engine: EngineMemory, work: DecodeWork, steps: str = "decode steps") -> ResourceUse:
    """Return the use of one GPU of an engine in decode steps. It is linear in all but `batches`."""
    model, parallelism = job.model, job.engine_parallelism
    gpus, tokens = parallelism.gpus, work.tokens / parallelism.gpus
    # Dispatch in FP8, combine in bfloat16.
    all_to_all = model.experts_per_token * model.hidden_size * 3 * model.num_moe_layers * tokens
    to_other_nodes = max(0.0, 1 - job.gpus_per_node / parallelism.expert)
    all_reduce = 4 * model.num_layers * model.hidden_size * tokens * parallelism.attention_tensor
    layers = work.decode_steps * model.num_layers
    return ResourceUse(
        # Attention of decoding is in device_bytes: its kernels read the cache while they multiply.
        flops=tokens * forward_flops_per_token(model, job.hf, 0),
        fp8=job.engine_uses_fp8,
        device_bytes=_weight_bytes(job, engine, work) + _attention_bytes(job, engine, work.cached_tokens),
        nvlink_bytes=all_reduce * (parallelism.attention_tensor > 1)
        + all_to_all * (1 - to_other_nodes) * (parallelism.expert > 1),
        network_bytes=all_to_all * to_other_nodes,
        waits=(
            Wait(f"layers of {steps}", layers, OVERHEADS.decode_layer_s),
            Wait(f"small collectives of {steps}", 2 * layers * (gpus > 1), _collective_s(job)),
        ),
    )


def _collective_s(job: PlannedJob) -> float:
    """Return the latency of a small collective of an engine."""
    engine = job.settings.engine
    by_nccl = engine.args.get("moe_a2a_backend") not in REPLICATING_A2A_BACKENDS
    over_nodes = engine.gpus_per_engine > job.gpus_per_node
    return OVERHEADS.network_collective_s if by_nccl and over_nodes else OVERHEADS.decode_collective_s


def _weight_bytes(job: PlannedJob, engine: EngineMemory, work: DecodeWork) -> float:
    """Return the bytes of weights that one GPU reads in all decode steps: few sequences do not use every expert."""
    model = job.model
    if not model.num_experts:
        return work.decode_steps * engine.weights
    unused = fmean((1 - model.experts_per_token / model.num_experts) ** batch for batch in work.batches)
    routed = routed_parameters(model, model.num_experts)
    rest = active_parameters(model, job.hf) - routed_parameters(model, model.experts_per_token)
    routed_share = routed / (routed + rest)
    return work.decode_steps * engine.weights * (1 - routed_share * unused)


def _attention_bytes(job: PlannedJob, engine: EngineMemory, cached_tokens: float) -> float:
    """Return the bytes of cache that one GPU reads, or more where its attention's products take longer than reading.

    A latent cache is multiplied as it is: all heads of the GPU use the same elements.
    """
    model, cluster, parallelism = job.model, job.cluster, job.engine_parallelism
    width = 2 * model.mla_cache_dim if model.mla_cache_dim else model.qk_head_dim + model.v_head_dim
    heads = max(1.0, model.num_heads / parallelism.attention_tensor)
    flops = 2 * model.num_layers * heads * width
    matmul_bytes_per_flop = (cluster.device_memory_gb_s * GIGA * cluster.achievable.device_memory) / (
        cluster.bf16_tflops * TERA * cluster.achievable.matmul
    )
    return cached_tokens / parallelism.replicas * max(engine.bytes_per_token, flops * matmul_bytes_per_flop)
