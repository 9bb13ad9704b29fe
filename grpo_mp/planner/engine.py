"""What one GPU of an engine holds: weights, cache, graphs. SGLang's arithmetic, by its own arguments."""

from dataclasses import dataclass

from grpo_mp.models.families import family_of
from grpo_mp.models.mapping import Rule
from grpo_mp.planner.bytes_per_parameter import BYTES
from grpo_mp.planner.job import Job
from grpo_mp.planner.overheads import OVERHEADS
from grpo_mp.planner.parameter_count import rule_count
from grpo_mp.rollout.engine_parallelism import check_engine_parallelism
from grpo_mp.rollout.precision import in_fp8


@dataclass(frozen=True)
class EngineShape:
    """How an engine divides the model over its GPUs."""

    gpus: int
    attention_tensor: int  # attention, and what follows it, is divided over so many
    replicas: int  # data-parallel attention: each has its own cache and its own requests
    expert: int
    expert_tensor: int
    dense_tensor: int
    shared_tensor: int
    fp8: bool


@dataclass(frozen=True)
class EngineLoad:
    """Bytes on one GPU. `tokens`: what the caches of the whole engine hold."""

    weights: float
    cache: float
    graphs: float
    groups: float
    token_bytes: float
    tokens: int


def engine_shape(job: Job) -> EngineShape:
    """From engine.gpus and engine.args.

    Raises UserError where they do not divide each other or the model, or cut a block of blockwise FP8.
    """
    engine = job.settings.engine
    division = check_engine_parallelism(engine.gpus, engine.args, job.hf)
    fp8 = in_fp8(engine.args, job.hf, cpu=False)
    return EngineShape(
        division.gpus,
        division.attention_tensor,
        division.replicas,
        division.expert,
        division.expert_tensor,
        division.dense_tensor,
        division.shared_tensor,
        fp8,
    )


def engine_load(job: Job) -> EngineLoad:
    """Weights, and the cache that `mem_fraction_static` leaves beside them; a cache below 0 tokens holds none."""
    shape, args = engine_shape(job), job.settings.engine.args
    weights = weight_bytes(job, shape)
    fraction = float(args.get("mem_fraction_static", OVERHEADS.mem_fraction_static))
    graphs = 0.0 if args.get("disable_cuda_graph") else OVERHEADS.graphs
    cache = max(0.0, fraction * job.cluster.gpu_bytes - weights)
    token = token_bytes(job, shape)
    groups = OVERHEADS.engine_groups + (OVERHEADS.all_to_all if args.get("moe_a2a_backend") == "deepep" else 0.0)
    return EngineLoad(weights, cache, graphs, groups, token, int(cache / token) * shape.replicas)


def weight_bytes(job: Job, shape: EngineShape) -> float:
    """On one GPU. Blockwise FP8 halves the matrices of the layers; embedding and output layer stay wide.

    Copies of key and value heads, where there are fewer than ranks, are left out: a few thousandths.
    """
    size = BYTES[job.settings.model.dtype]
    narrow = 1 + 4 / 128**2 if shape.fp8 else size  # with a float32 scale for each block
    rules = [rule for rule in family_of(job.hf).rules(job.hf) if rule.layers != () and not rule.alias]
    return sum(_rule_parameters(job, shape, rule) * (narrow if rule.layers else size) for rule in rules)


def _rule_parameters(job: Job, shape: EngineShape, rule: Rule) -> int:
    count = rule_count(rule, _divided_over(job, shape, rule.name), shape.expert, shape.expert_tensor)
    return count.total * len(rule.layers or (0,))


def _divided_over(job: Job, shape: EngineShape, name: str) -> int:
    """Ranks that share a matrix outside the routed experts."""
    if "shared_experts" in name:
        return shape.shared_tensor
    if ".mlp." in name:
        return shape.dense_tensor
    local = "layers" in name or name.startswith("embedding") or job.settings.engine.args.get("enable_dp_lm_head")
    return shape.attention_tensor if local else shape.gpus


def token_bytes(job: Job, shape: EngineShape) -> float:
    """Of one token in the cache of one GPU; latent attention keeps the same on every GPU of a replica."""
    model = job.shape
    width = model.latent_width or 2 * max(1, model.kv_heads / shape.attention_tensor) * model.query_width
    fp8 = "fp8" in str(job.settings.engine.args.get("kv_cache_dtype"))
    return model.layers * width * (1 if fp8 else BYTES[job.settings.model.dtype])
