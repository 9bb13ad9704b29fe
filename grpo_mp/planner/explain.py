"""Explain what settings mean, in words and numbers."""

from collections.abc import Iterator

from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.planner.job import PlannedJob
from grpo_mp.rollout.placement import engine_host_ranks, engine_placements

# Variables that the run sets for its processes, and why.
ENVIRONMENT = (
    (
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "every rank, unless it is set: communication is launched before the kernels it hides behind",
    ),
    (
        "NVTE_BATCH_MHA_P2P_COMM=1",
        "every rank, unless it is set: context-parallel ranks share one communicator",
    ),
    ("RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_*", "read from torchrun or srun; engines do not see them"),
    ("OMP_NUM_THREADS, PYTHONPATH, PYTHONUNBUFFERED=1, PYTHONSAFEPATH=1, TMPDIR", "every engine"),
    ("HF_HUB_OFFLINE=1, TOKENIZERS_PARALLELISM=false", "every engine"),
    ("no_proxy, NO_PROXY", "every engine: loopback is added"),
)

OPTIMIZER_PLACES = {
    "none": "the optimizer's state stays on the device",
    "step": "the optimizer's state to the host",
    "host": "the optimizer's state is always on the host, and goes through the device in pieces for an update",
}


def explain(job: PlannedJob) -> str:
    """Return several lines; each explains one thing."""
    environment = "environment: " + "; ".join(f"{names} ({reason})" for names, reason in ENVIRONMENT)
    return "\n".join(f"- {line}" for line in (*_step(job), *_placement(job), *_numerics(job), environment))


def _step(job: PlannedJob) -> Iterator[str]:
    settings, rollout, training = job.settings, job.settings.rollout, job.settings.training
    samples, updates = settings.samples_per_step, settings.optimizer_steps_per_step
    yield f"{settings.step_summary}; {settings.run.length} in total"
    stale = f"those of its last update are {updates - 1} updates old" if updates > 1 else "none is stale"
    if rollout.max_staleness:
        oldest = f"{rollout.max_staleness} step{'s' * (rollout.max_staleness > 1)}"
        yield f"staleness: a sample begins by weights up to {oldest} older than those before the step's first update"
        if rollout.tokens_ahead:
            yield f"a response of a later step is given {rollout.tokens_ahead:,} tokens by each step's weights"
    else:
        yield f"staleness: a step samples from the weights before its first update; {stale}"
    yield (
        f"longest sequence: {rollout.max_prompt_tokens:,} + {rollout.max_response_tokens:,} = "
        f"{rollout.max_sequence_tokens:,} tokens; a micro-batch holds up to {training.max_tokens_per_microbatch:,}, "
        f"or one longer sequence: {job.microbatch_tokens:,} tokens, "
        f"{-(-job.microbatch_tokens // settings.layout.context):,} of them on a rank"
    )
    per_gpu = samples * job.mean_seq_len / job.world_size
    yield f"tokens per GPU and step: {per_gpu:,.0f}, with a mean response length of {job.mean_response_tokens:,.0f}"


def _placement(job: PlannedJob) -> Iterator[str]:
    layout, engine, parallelism = job.settings.layout, job.settings.engine, job.engine_parallelism
    shared, ranks = job.settings.shares_devices, engine.ranks
    which = "all" if shared else f"the first {job.train_ranks} of"
    yield (
        f"trainer: {which} {job.world_size} GPUs of {job.nodes} nodes; "
        f"{describe_parallelism(layout, job.train_ranks)}; "
        f"the optimizer of dense parameters over {job.dense_shards} ranks, of experts over {job.expert_shards}; "
        f"layers of the stages: {', '.join(str(len(layers)) for layers in job.stage_layers)}"
    )
    if job.has_critic:
        critic = job.critic
        yield (
            f"critic: {critic.parameters:,} parameters of {critic.settings.model.path}, on the same GPUs; "
            f"{describe_parallelism(critic.settings.layout, job.train_ranks)}; "
            f"layers of the stages: {', '.join(str(len(layers)) for layers in critic.stage_layers)}"
        )
    hosts = engine_host_ranks(engine_placements(engine, job.world_size, job.gpus_per_node))
    replicas = parallelism.replicas
    yield (
        f"engines: {len(hosts)} of {engine.gpus_per_engine} GPUs on "
        f"{'the same devices, in turn with the trainer' if shared else f'the last {ranks} GPUs, beside the trainer'}; "
        f"servers are "
        f"started by rank{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}; "
        f"attention over {parallelism.attention_tensor} in {replicas} replica{'s' * (replicas > 1)}, "
        f"experts over {parallelism.expert}"
    )
    place = OPTIMIZER_PLACES[job.optimizer_offload]
    if job.offloads:
        yield f"offloaded while the engines generate: weights to the host; gradients are freed; {place}"
    elif shared:
        yield "nothing is offloaded: a float32 policy and its engine share the device"
    else:
        yield f"nothing is offloaded: the engines have devices of their own; {place}"


def _numerics(job: PlannedJob) -> Iterator[str]:
    settings = job.settings
    kl = settings.algorithm.kl
    monitor_share = f" for {kl.monitor_share:.1%} of the micro-batches (kl.monitor_share)" if not kl.coef else ""
    reference = f"kept on the host, KL weight {kl.coef:g}{monitor_share}"
    yield f"reference: {reference if job.has_reference else 'none, the KL weight is 0'}"
    if job.hf.get("num_nextn_predict_layers"):
        drafts = settings.engine.speculative.drafts_by_mtp
        served = "drafts for the engines" if drafts else "does not draft for the engines"
        trained = "learns, on the last stage" if settings.model.trains_mtp else "is not trained"
        yield f"the multi-token-prediction layer of the model {served} and {trained}"
    yield (
        f"algorithm: {settings.algorithm.preset}; {settings.model.dtype} weights, "
        f"recompute {settings.training.recompute}, "
        f"logits of {settings.training.logprob_chunk_tokens:,} tokens at a time"
    )
