"""Choices of an engine for each token, as SGLang returns them with a response.

They are the experts of MoE layers (`return_routed_experts`) and, with `training.router_replay=R3_keys`, the keys of
sparse attention (`return_indexer_topk`). `shape.indexer` is None where keys are not recorded: see `recorded_shape`.
"""

import base64
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_mp.config.sections import TrainingConfig
from grpo_mp.distributed.layout import ModelShape, model_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_layout import attention_replicas, read_argument
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import ExpertIds, expert_id_bytes

ARGUMENT = "enable_return_routed_experts"
RETURN_KEYS = "enable_return_indexer_topk"
KEY_BYTES = 4  # of a position
MAX_KEY_BYTES = 2**32  # of the keys of one response, which SGLang sends in one message
# SGLang stores the experts of a token by its KV-cache slot, batch after batch. Caches that restore tokens to other
# slots, and batches that are split in two, would return the experts of other tokens.
WRONG_WITH = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_two_batch_overlap")


def recorded_shape(hf: HfConfig, training: TrainingConfig) -> ModelShape | None:
    """Return the shape of the model whose choices samples record; None if they record nothing."""
    if not training.replays_engine:
        return None
    shape = model_shape(hf)
    return shape if training.replays_keys else replace(shape, indexer=None)


def check_replayed_keys(args: Mapping[str, Any], gpus: int, shape: ModelShape, max_tokens: int) -> None:
    """Check that SGLang can return the keys that indexers choose. `max_tokens`: of a prompt and its response."""
    topk = shape.indexer.topk if shape.indexer else 0
    size = KEY_BYTES * max_tokens * shape.num_layers * topk
    reason = None
    if not topk:
        reason = "needs a model with sparse attention, which model.path is not"
    elif max_tokens <= topk:
        reason = f"has no effect: an indexer chooses {topk} keys, and sequences have at most {max_tokens} tokens"
    elif attention_replicas(args) != gpus:
        reason = f"needs replicas of attention of one GPU each: set engine.args.attn_dp_size={gpus}"
    elif size > MAX_KEY_BYTES:
        reason = f"would send {size / 2**30:.1f} GiB of keys with a sequence of {max_tokens} tokens, the limit is 4 GiB"
    if reason:
        raise UserError(f"training.router_replay=R3_keys {reason}: change that, or set R3")


def check_routed_experts(args: Mapping[str, Any], known: Set[str], shape: ModelShape) -> None:
    """Check that SGLang can return choices with the user's `engine.args`.

    `known`: names of the arguments of the installed SGLang.
    """
    reason = None
    if ARGUMENT not in known:
        reason = f"needs an SGLang that has {ARGUMENT}, the installed one does not"
    elif shape.experts_per_token == 1:
        reason = "needs two experts a token: of one, a token that SGLang did not capture could not be told"
    elif read_argument(args, "chunked_prefill_size", 1) <= 0:
        reason = "needs engine.args.chunked_prefill_size above 0, by which SGLang sizes its buffer of experts"
    elif wrong := [name for name in WRONG_WITH if args.get(name)]:
        reason = f"does not work with engine.args.{wrong[0]}: SGLang would return the experts of other tokens"
    if reason:
        raise UserError(f"training.router_replay=R3 {reason}: change that, or set R2 or none")


def read_choices(meta: Mapping[str, Any], tokens: int, shape: ModelShape, known: int = 0) -> ExpertIds | None:
    """Return the choices of a response, without those of the first `known` tokens.

    Experts: [tokens - known, MoE layers, top-k], uint8 if the ids fit, else int16. With keys: records
    [tokens - known] of `experts` and `keys`, int32 positions [indexers, top-k]. `meta`: SGLang's meta_info; `tokens`:
    number of tokens that went through the model. Returns None, which disables replay, for missing or invalid choices.
    """
    experts = _read_experts(meta, tokens, shape, known)
    if shape.indexer is None or experts is None:
        return experts
    keys = _read_keys(meta, tokens, shape)
    if keys is None:
        return None
    kinds = [("experts", experts.dtype, experts.shape[1:]), ("keys", keys.dtype, keys.shape[1:])]
    choices = np.empty(len(experts), np.dtype(kinds))
    choices["experts"] = experts
    choices["keys"] = keys[known:]
    return choices


def _read_keys(meta: Mapping[str, Any], tokens: int, shape: ModelShape) -> npt.NDArray[np.int32] | None:
    """Return the positions of the keys that indexers chose, int32 [tokens, indexers, top-k]; None if they are invalid.

    `meta`: SGLang's meta_info with int32 [tokens, all layers, top-k] in base64. The first top-k tokens attend to all
    keys before them, and their values have no meaning.
    """
    if not meta.get("indexer_topk") or shape.indexer is None:
        return None
    sent = np.frombuffer(base64.b64decode(meta["indexer_topk"]), np.int32)
    if sent.size != tokens * shape.num_layers * shape.indexer.topk:
        return None
    keys = sent.reshape(tokens, shape.num_layers, -1)[:, sorted(shape.indexer.layers)]
    chosen = keys[shape.indexer.topk :]
    last = np.arange(shape.indexer.topk, tokens)[:, None, None]  # a token attends to itself and to tokens before it
    # SGLang's buffer is initialized with zeros. Its default kernels return slots of the KV cache, not positions.
    is_valid = bool(((chosen >= 0) & (chosen <= last)).all() and (chosen[..., 0] != chosen[..., 1]).all())
    return keys if is_valid else None


def _read_experts(meta: Mapping[str, Any], tokens: int, shape: ModelShape, known: int) -> ExpertIds | None:
    """Return the experts of `read_choices`. `meta` has int32 [tokens - known, all layers, top-k] in base64."""
    if meta.get("routed_experts") is None:
        return None
    sent = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    if sent.size != (tokens - known) * shape.num_layers * shape.experts_per_token:
        return None
    chosen = sent.reshape(tokens - known, shape.num_layers, -1)[:, np.array(shape.is_moe_layer)]
    in_range = chosen.min(initial=0) >= 0 and chosen.max(initial=0) < shape.num_experts
    # SGLang's buffer is initialized with zeros, so a token that was not captured has the same expert twice.
    captured = bool((chosen[..., 0] != chosen[..., 1]).all())
    if not (in_range and captured):
        return None
    return chosen.astype(np.uint8 if expert_id_bytes(shape.num_experts) == 1 else np.int16)


def joined_routed_experts(
    begun: ExpertIds | None, resumed: ExpertIds | None, begun_tokens: int, resumed_tokens: int
) -> ExpertIds | None:
    """Concatenate the experts of a paused response and its continuation; None if one of them is unknown.

    `resumed`: experts without the first `known_tokens`; `begun_tokens`, `resumed_tokens`: number of generated tokens of
    each part; the experts of a part without tokens are ignored.
    """
    if not begun_tokens:
        return resumed
    if not resumed_tokens:  # paused again before its first token
        return begun
    return None if begun is None or resumed is None else np.concatenate((begun, resumed))


def known_tokens(begun: ExpertIds | None, begun_tokens: int) -> int:
    """Return the number of leading tokens of a paused sequence (prompt and response) whose experts are known."""
    return len(begun) if begun_tokens and begun is not None else 0
