"""What an engine keeps on each of its devices: weights, the KV cache that they leave room for, drafts, graphs."""

from dataclasses import dataclass, replace

from grpo_mp.models.families import family_of
from grpo_mp.models.mapping import Rule
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import rule_parameters
from grpo_mp.policy.parameter_bytes import DTYPE_BYTES
from grpo_mp.rollout.engine_parallelism import read_argument


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU; `kv_cache_tokens` is what the KV caches of the engine hold.

    `bytes_per_token`: of the model's cache; that of the layer that drafts, if any, holds the same tokens.
    """

    weights: float
    draft_weights: float
    kv_cache: float
    draft_kv_cache: float
    cuda_graphs: float
    communication: float
    bytes_per_token: float
    kv_cache_tokens: int


def engine_memory(job: PlannedJob) -> EngineMemory:
    """Return weights, and the KV caches that `mem_fraction_static` leaves beside them (0 where it leaves nothing).

    SGLang sizes the caches when the layer that drafts is there: it caches as many tokens, in one layer.

    Raises UserError where engine.gpus_per_engine and engine.args do not divide each other, the model or a block of FP8.
    """
    args, weights, draft_weights = job.settings.engine.args, engine_weight_bytes(job), draft_weight_bytes(job)
    fraction = read_argument(args, "mem_fraction_static", OVERHEADS.mem_fraction_static)
    caches, model = max(0.0, fraction * job.cluster.gpu_bytes - weights - draft_weights), job.model
    # Of one GPU; a latent cache is the same on every GPU of a replica.
    kv_heads = max(1, model.num_kv_heads / job.engine_parallelism.attention_tensor)
    elements = model.num_layers * (model.mla_cache_dim or 2 * kv_heads * model.qk_head_dim)
    bytes_per_token = elements * (
        1 if "fp8" in str(args.get("kv_cache_dtype")) else DTYPE_BYTES[job.settings.model.dtype]
    )
    draft_layers = int(job.settings.engine.speculative.drafts_by_mtp)
    draft_kv_cache = caches * draft_layers / (model.num_layers + draft_layers)
    deepep = OVERHEADS.deepep_buffers if args.get("moe_a2a_backend") == "deepep" else 0.0
    return EngineMemory(
        weights=weights,
        draft_weights=draft_weights,
        kv_cache=caches - draft_kv_cache,
        draft_kv_cache=draft_kv_cache,
        cuda_graphs=0.0 if args.get("disable_cuda_graph") else OVERHEADS.cuda_graphs,
        communication=OVERHEADS.engine_nccl + deepep,
        bytes_per_token=bytes_per_token,
        kv_cache_tokens=int((caches - draft_kv_cache) / bytes_per_token) * job.engine_parallelism.replicas,
    )


def engine_weight_bytes(job: PlannedJob) -> float:
    """Return the bytes of weights on one GPU. In blockwise FP8, embedding, output and routers keep the model's dtype.

    Copies of key and value heads, where there are fewer than ranks, are left out: a few thousandths.
    """
    return sum(_rule_bytes(job, rule) * len(rule.layers or (0,)) for rule in _rules(job))


def draft_weight_bytes(job: PlannedJob) -> float:
    """Return the bytes of the layer that drafts on one GPU; embedding and output layer are the model's own.

    It is as large as the model's last layer, with three norms and a projection of hidden states beside embeddings,
    which every GPU holds in the model's dtype.
    """
    if not job.settings.engine.speculative.drafts_by_mtp:
        return 0.0
    layer = sum(_rule_bytes(job, rule) for rule in _rules(job) if job.model.num_layers - 1 in (rule.layers or ()))
    hidden_size = job.model.hidden_size
    return layer + (2 * hidden_size**2 + 3 * hidden_size) * DTYPE_BYTES[job.settings.model.dtype]


def _rules(job: PlannedJob) -> list[Rule]:
    rules = family_of(job.hf).rules(replace(job.hf, trains_mtp=False))
    return [rule for rule in rules if not (rule.applies_to_no_layer or rule.alias)]


def _rule_bytes(job: PlannedJob, rule: Rule) -> float:
    """Return the bytes of a mapping rule's parameter on one GPU, in one layer."""
    parallelism, dtype_bytes = job.engine_parallelism, DTYPE_BYTES[job.settings.model.dtype]
    # Outside the layers only the embedding follows attention, and with its own option the output layer.
    embeds = rule.name.startswith("embedding") or job.settings.engine.args.get("enable_dp_lm_head")
    like_layers = "layers" in rule.name or embeds
    tensor = parallelism.divisor(rule.name, routed_expert=False)[0] if like_layers else parallelism.gpus
    count = rule_parameters(rule, tensor, parallelism.expert, parallelism.expert_tensor)
    quantized = job.engine_uses_fp8 and rule.layers and "router" not in rule.name
    return count.total * (1 + 4 / 128**2 if quantized else dtype_bytes)  # with a float32 scale for each block
