"""Time of generation: decoding reads all weights and the caches of all running sequences for every token."""

from dataclasses import dataclass

from grpo_mp.planner.engine import EngineLoad, engine_shape
from grpo_mp.planner.job import Job
from grpo_mp.planner.resource_use import Work, decode_latency_s
from grpo_mp.planner.training import active_parameters, token_flops


@dataclass(frozen=True)
class Generation:
    """Of one engine: its samples of a step, how many run at a time, and decode steps in all, the longest's included."""

    samples: float
    running: float
    steps: float


def plan_generation(job: Job, engine: EngineLoad) -> Generation:
    """By the mean length while there are samples, and then down to the end of the longest response."""
    rollout, args = job.settings.rollout, job.settings.engine.args
    samples = job.settings.samples_per_step / job.engines
    in_flight = job.settings.engine.concurrent_groups * rollout.group_size
    shape = engine_shape(job)
    limit = float(args.get("max_running_requests") or in_flight)
    running = max(1.0, min(samples, in_flight, limit, engine.tokens / job.mean_tokens))
    waves = samples / running
    steps = max(rollout.max_response_tokens, waves * job.response_tokens)
    return Generation(samples, running / shape.replicas, steps)


def generate_work(job: Job, engine: EngineLoad) -> Work:
    """Of one GPU of an engine: prefill of its prompts, and every decode step."""
    plan, shape = plan_generation(job, engine), engine_shape(job)
    tokens = plan.samples * job.response_tokens / shape.gpus
    prompts = plan.samples / job.settings.rollout.group_size * job.settings.rollout.max_prompt_tokens / 2 / shape.gpus
    flops = (tokens + prompts) * token_flops(job, job.mean_tokens)
    read = plan.steps * _weights_read(job, engine, plan.running * shape.replicas)
    cache = plan.samples * job.response_tokens * job.mean_tokens / 2 * engine.token_bytes / shape.replicas
    routed = job.shape.experts_per_token * job.shape.hidden * 3 * sum(job.shape.sparse) * tokens  # FP8 there, wide back
    outside = max(0.0, 1 - job.gpus_per_node / shape.expert)
    sums = 4 * job.shape.layers * job.shape.hidden * tokens * shape.attention_tensor
    collectives = 2 if shape.gpus > 1 else 0
    return Work(
        flops=flops,
        fp8=shape.fp8,
        device_bytes=read + cache,
        nvlink_bytes=sums * (shape.attention_tensor > 1) + routed * (1 - outside) * (shape.expert > 1),
        network_bytes=routed * outside,
        latency_s=plan.steps * decode_latency_s(job.shape.layers, collectives),
    )


def _weights_read(job: Job, engine: EngineLoad, running: float) -> float:
    """Of a GPU's weights, what one decode step reads: with few sequences not every expert is met."""
    shape = job.shape
    if not shape.experts:
        return engine.weights
    met = 1 - (1 - shape.experts_per_token / shape.experts) ** running
    routed = sum(shape.sparse) * shape.experts * 3 * shape.hidden * shape.expert_width
    rest = active_parameters(job) - sum(shape.sparse) * shape.experts_per_token * 3 * shape.hidden * shape.expert_width
    share = routed / (routed + rest)
    return engine.weights * (share * met + 1 - share)
