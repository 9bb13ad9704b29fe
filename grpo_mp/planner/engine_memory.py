"""GPU memory of SGLang servers: the engine with its draft layer, reward models, and teachers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import BLOCK
from grpo_mp.models.mapping import Rule
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import rule_parameters
from grpo_mp.policy.parameter_bytes import DTYPE_BYTES
from grpo_mp.rollout.engine_args import GRAPH_REQUESTS, cuda_defaults, speculative_arguments
from grpo_mp.rollout.engine_layout import read_argument
from grpo_mp.rollout.routed_experts import KEY_BYTES
from grpo_mp.utils.errors import UserError

STATES_TO_KV_CACHE = 0.9  # memory of states of linear attention by that of the KV cache (mamba_full_memory_ratio)
WINDOW_TO_FULL_TOKENS = 0.8  # tokens in the pool of layers with a sliding window (swa_full_tokens_ratio)
STATE_SLOTS = 3  # that SGLang counts for a running sequence and its cached prefixes
CONVOLUTION_BYTES = 2  # of an input of a convolution: SGLang keeps them in bfloat16
# Arguments that limit the tokens of a batch, with SGLang's defaults for GPUs of 60 GiB and more.
BATCH_LIMITS = {"chunked_prefill_size": 8192, "max_running_requests": 0}
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on one GPU; `kv_cache_tokens` is the capacity of the whole engine [tokens].

    `bytes_per_token` excludes the draft layer, whose cache has the same number of tokens. Layers with a sliding window
    have a pool of their own, of fewer tokens: their share counts as SGLang sizes it.
    """

    weights: float = 0.0
    draft_weights: float = 0.0
    kv_cache: float = 0.0
    draft_kv_cache: float = 0.0
    states: float = 0.0  # of linear attention
    state_sequences: int = 0  # running sequences that the whole engine has states for
    cuda_graphs: float = 0.0
    key_buffer: float = 0.0  # of the keys that the indexers of a batch chose, for their replay
    communication: float = 0.0
    bytes_per_token: float = 1.0
    layer_token_bytes: float = 1.0  # of one token in one layer
    kv_cache_tokens: int = 0


def engine_memory(job: PlannedJob) -> EngineMemory:
    """Return the memory of an engine. Its KV caches fill what the weights leave of `mem_fraction_static`.

    `max_total_tokens` limits the tokens of each replica."""
    if job.trains_only:
        return EngineMemory()
    args = job.settings.engine.args
    weights = engine_weight_bytes(job)
    draft_weights = draft_weight_bytes(job)
    fraction = read_argument(args, "mem_fraction_static", OVERHEADS.mem_fraction_static)
    caches = max(0.0, fraction * job.cluster.gpu_bytes - weights - draft_weights)
    model = job.model
    # Per GPU. A latent cache is replicated on every GPU of a replica.
    kv_heads = max(1, model.num_kv_heads / job.engine_parallelism.attention_tensor)
    elements = model.mla_cache_dim or 2 * kv_heads * model.qk_head_dim
    in_fp8 = "fp8" in str(args.get("kv_cache_dtype"))
    layer_token_bytes = elements * (1 if in_fp8 else DTYPE_BYTES[job.settings.model.dtype])
    if in_fp8 and model.indexer:  # latents with a float32 scale by block, rotary keys in bfloat16
        latent = job.hf.int("kv_lora_rank")
        layer_token_bytes = latent + latent // BLOCK * 4 + (elements - latent) * 2
    cached_layers = model.num_attention_layers - model.window_layers * (1 - _window_pool_ratio(args))
    bytes_per_token = layer_token_bytes * cached_layers + indexer_token_bytes(model)
    # SGLang sizes both caches together: the draft layer caches the same number of tokens in one layer.
    draft_layers = int(job.settings.engine.speculative.drafts_by_mtp)
    states, state_sequences = state_pool(job, caches)
    caches = max(0.0, caches - states)
    draft_kv_cache = caches * draft_layers / (cached_layers + draft_layers)
    tokens = int((caches - draft_kv_cache) / bytes_per_token)
    used = min(1.0, read_argument(args, "max_total_tokens", tokens) / tokens) if tokens else 1.0
    deepep = OVERHEADS.deepep_buffers if args.get("moe_a2a_backend") == "deepep" else 0.0
    return EngineMemory(
        weights=weights,
        draft_weights=draft_weights,
        kv_cache=used * (caches - draft_kv_cache),
        draft_kv_cache=used * draft_kv_cache,
        states=states,
        state_sequences=state_sequences * job.engine_parallelism.replicas,
        cuda_graphs=0.0 if args.get("disable_cuda_graph") else _graph_bytes(job),
        key_buffer=_key_buffer_bytes(job),
        communication=OVERHEADS.engine_nccl + deepep,
        bytes_per_token=bytes_per_token,
        layer_token_bytes=layer_token_bytes,
        kv_cache_tokens=round(used * tokens) * job.engine_parallelism.replicas,
    )


def indexer_token_bytes(model: ModelShape) -> float:
    """Return the bytes of a token's keys of all indexers, which SGLang caches in FP8 with a float32 scale by block."""
    if model.indexer is None:
        return 0.0
    width = model.indexer.head_dim
    return float(len(model.indexer.layers) * (width + width // BLOCK * 4))


def _window_pool_ratio(args: Mapping[str, Any]) -> float:
    """Return the size of the sliding-window pool divided by the size of the full-attention pool [tokens].

    The rule is that of SGLang's HybridSWAPoolConfigurator. Its exception for engines without a radix cache, which
    sizes the first pool by max_running_requests, is not counted.
    """
    if args.get("disable_hybrid_swa_memory"):
        return 1.0
    return read_argument(args, "swa_full_tokens_ratio", WINDOW_TO_FULL_TOKENS)


def _key_buffer_bytes(job: PlannedJob) -> float:
    """Return the bytes of SGLang's buffer of chosen keys: of all layers, for the largest batch of one replica."""
    if job.replayed_indexer is None:
        return 0.0
    args = job.settings.engine.args
    tokens = max(read_argument(args, name, default) for name, default in BATCH_LIMITS.items())
    return float(KEY_BYTES * tokens * job.model.num_layers * job.replayed_indexer.topk)


def _graph_bytes(job: PlannedJob) -> float:
    """Return the bytes on one GPU of the decode graphs, which grow with the largest batch that is captured."""
    engine = job.settings.engine
    in_flight = engine.most_groups(job.settings.rollout) * job.settings.rollout.group_size
    args = cuda_defaults(engine.args, in_flight, 0.0) | engine.args
    return OVERHEADS.cuda_graphs * read_argument(args, "cuda_graph_max_bs_decode", GRAPH_REQUESTS) / GRAPH_REQUESTS


def state_pool(job: PlannedJob, caches: float) -> tuple[float, int]:
    """Return the bytes of states of linear attention on one GPU, and the running sequences that they suffice for.

    As SGLang's `_handle_max_mamba_cache` divides the `caches` bytes that states and KV cache have together. One slot is
    padding, and with speculative decoding each running sequence has a state for every verified token.
    """
    size = state_bytes(job)
    if not size:
        return 0.0, 0
    engine = job.settings.engine
    replicas = job.engine_parallelism.replicas
    args = {**engine.args, **speculative_arguments(engine, job.settings.rollout)}
    verified = read_argument(args, "speculative_num_draft_tokens", 0)
    per_sequence = _slots_per_sequence(args)
    running = read_argument(args, "max_running_requests", 0)
    slots = read_argument(args, "max_mamba_cache_size", 0) // replicas
    if not slots and args.get("disable_radix_cache") and running:
        slots = max(1, running // replicas)
    if not slots:
        ratio = read_argument(args, "mamba_full_memory_ratio", STATES_TO_KV_CACHE)
        budget = caches * ratio / (1 + ratio) - size * (1 + verified)
        slots = max(0, int(budget / (size * (1 + verified / per_sequence))))
    sequences = slots // per_sequence
    verifying = verified * (1 + min(max(1, running // replicas), sequences))
    return size * (slots + 1 + verifying), sequences


def _slots_per_sequence(args: Mapping[str, Any]) -> int:
    """Return the states that a running sequence needs: more where the radix cache tracks states during decoding."""
    if args.get("disable_radix_cache"):
        return 1
    strategy = args.get("mamba_radix_cache_strategy", "auto")
    overlaps = not args.get("disable_overlap_schedule")
    if strategy == "auto":
        tracks = overlaps or read_argument(args, "page_size", 1) > 1
        is_triton = args.get("linear_attn_backend", "triton") == "triton"
        strategy = "extra_buffer" if tracks and is_triton else "no_buffer"
    return STATE_SLOTS + {"extra_buffer": 1 + overlaps, "extra_buffer_lazy": 1}.get(strategy, 0)


def state_bytes(job: PlannedJob) -> float:
    """Return the bytes on one GPU of the states of one sequence, with the inputs of the convolutions."""
    linear = job.model.linear
    if linear is None:
        return 0.0
    named = job.settings.engine.args.get("mamba_ssm_dtype") or job.hf.get("mamba_ssm_dtype")
    state = linear.state_elements * (2 if named in ("bfloat16", "float16") else 4)
    inputs = linear.channels * (linear.window - 1) * CONVOLUTION_BYTES
    return len(linear.layers) * (state + inputs) / job.engine_parallelism.attention_tensor


def engine_weight_bytes(job: PlannedJob) -> float:
    """Return the bytes of engine weights on one GPU.

    In a low precision the embedding, output layer and routers keep the model's dtype. Replicated key and value heads,
    where there are fewer heads than ranks, are neglected (a few thousandths).
    """
    return sum(_rule_bytes(job, rule) * len(rule.layers or (0,)) for rule in engine_rules(job))


def draft_weight_bytes(job: PlannedJob) -> float:
    """Return the bytes of the multi-token-prediction layer on one GPU; 0 unless the engine drafts with it.

    The layer is a copy of the last decoder layer, plus three norms and the input projection [hidden, 2 * hidden], which
    every GPU holds in the model's dtype. It shares the model's embedding and output layer.
    """
    if not job.settings.engine.speculative.drafts_by_mtp:
        return 0.0
    last = job.model.num_layers - 1
    layer = sum(_rule_bytes(job, rule) for rule in engine_rules(job) if last in (rule.layers or ()))
    hidden_size = job.model.hidden_size
    return layer + (2 * hidden_size**2 + 3 * hidden_size) * DTYPE_BYTES[job.settings.model.dtype]


def engine_rules(job: PlannedJob, with_draft: bool = False) -> list[Rule]:
    """Return the mapping rules of an engine's weights. `with_draft`: and of the trained layer that drafts."""
    rules = family_of(job.hf).rules(replace(job.hf, trains_mtp=with_draft))
    return [rule for rule in rules if not (rule.applies_to_no_layer or rule.alias)]


def is_quantized(job: PlannedJob, rule: Rule) -> bool:
    """Return whether the engine holds the rule's weights in a low precision."""
    form = job.engine_format
    if form is None or (form.experts_only and not rule.experts):
        return False
    return bool(rule.layers) and "router" not in rule.name


def bytes_per_element(job: PlannedJob, rule: Rule) -> float:
    """Return the bytes of an element of the rule's weights; in a low precision including its share of the scale."""
    if job.engine_format and is_quantized(job, rule):
        return job.engine_format.bytes_per_element(getattr(torch, job.settings.model.dtype))
    return DTYPE_BYTES[job.settings.model.dtype]


def _rule_bytes(job: PlannedJob, rule: Rule) -> float:
    parallelism = job.engine_parallelism
    # Outside the layers, only the embedding is divided as attention is, and the output layer with enable_dp_lm_head.
    embeds = rule.name.startswith("embedding") or job.settings.engine.args.get("enable_dp_lm_head")
    like_layers = "layers" in rule.name or embeds
    tensor = parallelism.divisor(rule.name) if like_layers else parallelism.gpus
    if rule.name.startswith("embedding") and parallelism.replicas > 1 and job.hf.model_type.startswith("qwen3_5"):
        tensor = 1  # SGLang divides this family's embedding only where attention has no replicas
    count = rule_parameters(rule, tensor, parallelism.expert, parallelism.expert_tensor)
    return count.total * bytes_per_element(job, rule)


def served_memory(job: PlannedJob) -> dict[str, tuple[float, float]]:
    """Return the bytes of weights and KV cache on one GPU of the reward model and of each teacher that the job serves.

    While a model sleeps, its weights are on the host. The cache is the part of mem_fraction_static that weights leave.
    """
    distillation = job.settings.algorithm.distillation
    model = job.settings.reward.model
    models = {"reward model": model, **(distillation.teachers if distillation else {})}
    sizes = {}
    for name, served in models.items():
        if served and served.folder:
            weights = _folder_bytes(served.folder) / served.gpus_per_server
            fraction = read_argument(served.args, "mem_fraction_static", OVERHEADS.mem_fraction_static)
            sizes[name] = (weights, max(0.0, fraction * job.cluster.gpu_bytes - weights))
    return sizes


def _folder_bytes(folder: Path) -> int:
    kinds = (sum(file.stat().st_size for file in folder.glob(pattern)) for pattern in WEIGHT_FILES)
    size = next((size for size in kinds if size), 0)
    if not size:
        raise UserError(f"{folder}: it has no weights ({', '.join(WEIGHT_FILES)})")
    return size
