"""Experts of each token as SGLang returns them with a response (`return_routed_experts`)."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.types import ExpertIds


def read_routed_experts(meta: Mapping[str, Any], tokens: int, shape: ModelShape) -> ExpertIds | None:
    """Read the experts of a response from its meta_info: [tokens, MoE layers, top-k], a byte each where they fit.

    SGLang sends int32 [tokens, all layers, top-k] in base64. None where it sent nothing, another number of tokens, or
    experts that no router could have chosen: what is not known is not replayed.
    """
    if meta.get("routed_experts") is None:
        return None
    sent = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    if sent.size != tokens * shape.num_layers * shape.experts_per_token:
        return None
    chosen = sent.reshape(tokens, shape.num_layers, -1)[:, np.array(shape.is_moe_layer)]
    in_range = chosen.min(initial=0) >= 0 and chosen.max(initial=0) < shape.num_experts
    # SGLang's buffer begins with zeros, so a token that was not captured has the same expert twice.
    captured = shape.experts_per_token == 1 or bool((chosen[..., 0] != chosen[..., 1]).all())
    if not (in_range and captured):
        return None
    return chosen.astype(np.uint8 if shape.num_experts <= 256 else np.int16)


def joined_routed_experts(begun: ExpertIds | None, resumed: ExpertIds | None, has_tokens: bool) -> ExpertIds | None:
    """Return the experts of a response that was paused and resumed: of each token those with which it was computed.

    resumed: of the full sequence, because its engine computed prompt and prefix again; has_tokens: whether the paused
    response had any. None where a part is not known.
    """
    if not has_tokens or begun is None or resumed is None:
        return None if has_tokens else resumed
    return np.concatenate((begun, resumed[len(begun) :]))
