"""Routed experts of each token, as SGLang returns them with a response (`return_routed_experts`)."""

import base64
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rollout.engine_layout import read_argument
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import ExpertIds, expert_id_bytes

ARGUMENT = "enable_return_routed_experts"
# SGLang stores the experts of a token by its KV-cache slot, batch after batch. Caches that restore tokens to other
# slots, and batches that are split in two, would return the experts of other tokens.
WRONG_WITH = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_two_batch_overlap")


def check_routed_experts(args: Mapping[str, Any], known: Set[str], shape: ModelShape) -> None:
    """Check that SGLang can return routed experts with the user's `engine.args`.

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


def read_routed_experts(meta: Mapping[str, Any], tokens: int, shape: ModelShape, known: int = 0) -> ExpertIds | None:
    """Return the routed experts of a response: [tokens - known, MoE layers, top-k], uint8 if the ids fit, else int16.

    `meta`: SGLang's meta_info with int32 [tokens - known, all layers, top-k] in base64; `tokens`: number of tokens that
    went through the model; `known`: number of leading tokens that SGLang left out. Returns None, which disables
    replay, for missing or invalid experts.
    """
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
