"""Time of generation: decoding reads all weights and the caches of all running sequences for every token."""

from dataclasses import dataclass

from grpo_mp.planner.engine_memory import EngineMemory
from grpo_mp.planner.job import Job
from grpo_mp.planner.overheads import OVERHEADS
from grpo_mp.planner.resource_use import ResourceUse
from grpo_mp.planner.training import active_parameters, forward_flops_per_token, routed_parameters


@dataclass(frozen=True)
class GenerationPlan:
    """Decoding work of one engine in one step."""

    samples: float
    running_per_replica: float  # sequences at a time
    decode_steps: float  # those of the longest response included


def plan_generation(job: Job, engine: EngineMemory) -> GenerationPlan:
    """Count decode steps: responses of the mean length in waves, but at least those of the longest response."""
    rollout, args = job.settings.rollout, job.settings.engine.args
    samples = job.settings.samples_per_step / job.num_engines
    in_flight = job.settings.engine.concurrent_groups * rollout.group_size
    limit = float(args.get("max_running_requests") or in_flight)
    running = max(1.0, min(samples, in_flight, limit, engine.kv_cache_tokens / job.mean_seq_len))
    decode_steps = max(rollout.max_response_tokens, samples / running * job.mean_response_tokens)
    return GenerationPlan(samples, running / job.engine_parallelism.replicas, decode_steps)


def generation_use(job: Job, engine: EngineMemory) -> ResourceUse:
    """Return the use of one GPU of an engine: prefill of its prompts, and every decode step."""
    model, plan, parallelism = job.model, plan_generation(job, engine), job.engine_parallelism
    rollout, gpus = job.settings.rollout, parallelism.gpus
    tokens = plan.samples * job.mean_response_tokens / gpus
    prompt_tokens = plan.samples / rollout.group_size * rollout.max_prompt_tokens / 2 / gpus
    weights = _weight_bytes_per_step(job, engine, plan.running_per_replica * parallelism.replicas)
    context_tokens = plan.samples * job.mean_response_tokens * job.mean_seq_len / 2
    # Dispatch in FP8, combine in bfloat16.
    all_to_all = model.experts_per_token * model.hidden_size * 3 * model.num_moe_layers * tokens
    to_other_nodes = max(0.0, 1 - job.gpus_per_node / parallelism.expert)
    # Kernel launches of a layer, and its small collectives.
    layer_s = OVERHEADS.decode_layer_s + (2 if gpus > 1 else 0) * OVERHEADS.decode_collective_s
    all_reduce = 4 * model.num_layers * model.hidden_size * tokens * parallelism.attention_tensor
    return ResourceUse(
        flops=(tokens + prompt_tokens) * forward_flops_per_token(job, job.mean_seq_len),
        fp8=job.engine_in_fp8,
        device_bytes=plan.decode_steps * weights + context_tokens * engine.bytes_per_token / parallelism.replicas,
        nvlink_bytes=all_reduce * (parallelism.attention_tensor > 1)
        + all_to_all * (1 - to_other_nodes) * (parallelism.expert > 1),
        network_bytes=all_to_all * to_other_nodes,
        latency_s=plan.decode_steps * model.num_layers * layer_s,
    )


def _weight_bytes_per_step(job: Job, engine: EngineMemory, running: float) -> float:
    """Return the bytes of a GPU's weights that one decode step reads: few sequences do not use every expert."""
    model = job.model
    if not model.num_experts:
        return engine.weights
    used = 1 - (1 - model.experts_per_token / model.num_experts) ** running
    routed = routed_parameters(job, model.num_experts)
    rest = active_parameters(job) - routed_parameters(job, model.experts_per_token)
    routed_share = routed / (routed + rest)
    return engine.weights * (routed_share * used + 1 - routed_share)
