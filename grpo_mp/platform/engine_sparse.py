"""DeepSeek's sparse attention in a CPU engine: the lightning indexer in plain torch.

SGLang's own indexer and attention run on GPUs only. Here each indexer stores its keys in a buffer with a row for each
cache slot, and the engine computes dense attention over the usual latent cache with a mask of the chosen keys.
`is_sparse` returns True only while SGLang builds the layers, so that it sets up dense attention everywhere else.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from grpo_mp.platform.engine_attention import AttentionBatch, shared_plan

_builds = ContextVar("_builds", default=False)


def is_sparse(original: Callable[..., bool], config: Any) -> bool:
    """Replace `is_deepseek_dsa`, by which SGLang also chooses its attention backend, page size and KV cache."""
    return _builds.get() and original(config)


def build_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace `_initialize_model`: build the model with its indexers."""
    token = _builds.set(True)
    try:
        model = original(*args, **kwargs)
    finally:
        _builds.reset(token)
    for module in model.modules():
        if type(module).__name__ == "Indexer":
            head_weights = module.weights_proj.weight  # in bfloat16 whatever the dtype of the model
            head_weights.data = head_weights.data.to(torch.get_default_dtype())
            module._forward_method = MethodType(select_keys, module)
    return model


def create_capturer(original: Callable[..., Any], *, model_config: Any, **kwargs: Any) -> Any:
    """Replace `create_indexer_capturer`, which does nothing on a CPU, for `enable_return_indexer_topk`."""
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.state_capturer.indexer_topk import _create_indexer_capturer_raw

    config = model_config.hf_text_config
    return _create_indexer_capturer_raw(
        enable=get_exec().features.enable_return_indexer_topk,
        num_indexer_layers=config.num_hidden_layers,
        index_topk=getattr(config, "index_topk", None) or 0,
        **kwargs,
    )


@torch.no_grad()
def select_keys(
    indexer: Any, x: Tensor, q_lora: Tensor, positions: Tensor, forward_batch: Any, layer_id: int, **_: Any
) -> Tensor | None:
    """Replace the forward pass of SGLang's `Indexer`: return the positions that each token attends to.

    `x` [T, hidden_size], `q_lora` [T, q_lora_rank] and `positions` [T] of the new tokens. Result: see `best_keys`.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

    if forward_batch.forward_mode.is_idle():
        return None
    backend = get_attn_backend()
    query = indexer.wq_b(q_lora)[0].view(len(x), indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(x)[0])[:, None]
    sizes = (indexer.rope_head_dim, indexer.head_dim - indexer.rope_head_dim)
    query_rope, query_rest = query.split(sizes, -1)
    key_rope, key_rest = key.split(sizes, -1)
    rotated = indexer.rotary_emb(positions, query_rope, key_rope)
    query = torch.cat((rotated[0].reshape(query_rope.shape), query_rest), -1)
    key = torch.cat((rotated[1].reshape(key_rope.shape), key_rest), -1)
    if not hasattr(indexer, "keys"):
        slots = len(backend.token_to_kv_pool.get_key_buffer(layer_id))
        indexer.keys = key.new_zeros(slots, indexer.head_dim)
    indexer.keys[forward_batch.out_cache_loc] = key[:, 0]
    weights = indexer.weights_proj(x)[0].float() * (indexer.n_heads * indexer.head_dim) ** -0.5
    lengths = forward_batch.seq_lens
    new_lengths = torch.ones_like(lengths) if forward_batch.forward_mode.is_decode() else forward_batch.extend_seq_lens
    slots_of_requests = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
    plan = shared_plan(backend.plans, (indexer.n_heads, 1, None), slots_of_requests, lengths, new_lengths)
    return maybe_capture_indexer_topk(layer_id, best_keys(query, weights, indexer.keys, plan, indexer.index_topk))


def best_keys(query: Tensor, weights: Tensor, keys: Tensor, plan: Sequence[AttentionBatch], count: int) -> Tensor:
    """Return the positions of the `count` keys with the highest scores of each new token, [T, count]; -1: no key left.

    The score of key k: sum over heads h of weights[h] * relu(query[h] . k) (DeepSeek-V3.2, equation 1). Of equal scores
    the first position wins, whatever the batch. `query` [T, H, D], `weights` [T, H], `keys` [S, D] of S slots.
    """
    selected = torch.full((len(query), count), -1, dtype=torch.int32)
    for batch in plan:
        sequences, _, _, length = batch.mask.shape
        new = len(batch.tokens) // sequences
        causal = batch.mask[:, 0, :new] == 0
        if length <= count:
            places = torch.arange(length).expand(sequences, new, -1)
        else:
            batch_query = query.index_select(0, batch.tokens).to(weights.dtype).view(sequences, -1, query.shape[2])
            batch_keys = keys.index_select(0, batch.slots).to(weights.dtype).view(sequences, length, -1)
            heads = (batch_query @ batch_keys.transpose(1, 2)).relu_().view(sequences * new, -1, length)
            scores = (weights.index_select(0, batch.tokens)[:, None] @ heads).view(causal.shape)
            scores.masked_fill_(~causal, -torch.inf)
            places = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        places = places.masked_fill(~causal.gather(-1, places), -1)
        selected[batch.tokens, : places.shape[-1]] = places.flatten(0, 1).int()
    return selected


def restrict(plan: Sequence[AttentionBatch], selected: Tensor) -> list[AttentionBatch]:
    """Return the plan with a mask of the keys that are not selected. `selected` [T, K]: see `best_keys`."""
    restricted = []
    for batch in plan:
        sequences, _, rows, length = batch.mask.shape
        if length <= selected.shape[1]:  # all keys are selected
            restricted.append(batch)
            continue
        places = selected.index_select(0, batch.tokens).long()
        others = torch.ones(len(places), length + 1, dtype=torch.bool)
        others.scatter_(1, places % (length + 1), False)  # -1 becomes the column that is cut off
        others = others[:, :length].view(sequences, 1, -1, length)
        others = others.repeat(1, 1, rows // others.shape[2], 1)
        restricted.append(replace(batch, mask=batch.mask.masked_fill(others, -torch.inf)))
    return restricted
