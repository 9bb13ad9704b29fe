"""Experts of two requests in SGLang's own capturer, beside rows that pad a batch: in a process that may import SGLang.

`python -m tests.rollout.captured_rows NUMBERS`, where NUMBERS are layers, experts and experts a token, prints JSON: the
experts of each request as they were chosen, and as the capturer returns them, without and with places of its own in the
cache (virtual ones: SGLang gives those of the real rows alone); at last those of a token that was not computed.
"""

import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.state_capturer import routed_experts
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

ROWS, TOKENS, UNUSED = 4, 32, 20  # of a graph, of the cache, a place in it without a token


def make_capturer(layers: int, topk: int) -> RoutedExpertsCapturer:
    """The shared expert is fused: it has a column behind the routed ones."""
    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.empty(dims, dtype=dtype)
    stubs: dict[str, Any] = {
        "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=16),
        "get_parallel": lambda: SimpleNamespace(num_dp_ranks=1),
        "is_dp_attention_enabled": lambda: False,
        "_is_scattered_a2a_backend": lambda: False,
    }
    vars(routed_experts).update(stubs)
    text = SimpleNamespace(num_experts_per_tok=topk, num_hidden_layers=layers)
    model: Any = SimpleNamespace(hf_text_config=text)
    return RoutedExpertsCapturer(model, TOKENS, ROWS, 1, "cpu")


def run(layers: int, experts: int, topk: int, is_virtual: bool) -> dict[str, Any]:
    capturer, draw = make_capturer(layers, topk), np.random.default_rng(0)
    slots, chosen = [[7, 3], [5]], [list[Any](), list[Any]()]

    def forward(requests: Sequence[int], places: Sequence[int], rows: int) -> None:
        of_rows = draw.random((rows, layers, experts)).argsort(-1)[..., :topk]
        for layer in range(layers):
            fused = np.concatenate([of_rows[:, layer], np.full((rows, 1), experts)], axis=1)
            capturer.capture(layer, torch.from_numpy(fused).int())
        for row, request in enumerate(requests):
            chosen[request].append(of_rows[row].tolist())
        padded = torch.tensor([*places, *[0] * (rows - len(places))])
        batch: Any = SimpleNamespace(
            out_cache_loc=padded, out_cache_loc_virtual=torch.tensor(places) if is_virtual else None
        )
        capturer.on_forward_end(batch, True, rows)

    forward([0, 0, 1], [7, 3, 5], 3)  # prompts
    for places in ([9, 11], [10, 1]):  # two tokens of each request
        for of_request, place in zip(slots, places, strict=True):
            of_request.append(place)
        forward([0, 1], places, ROWS)

    def sent(of_request: Sequence[int]) -> list[Any]:
        pool: Any = SimpleNamespace(req_to_token=torch.tensor([of_request]))
        values: list[Any] = capturer.get_topk(0, len(of_request) + 1, pool).tolist()
        return values

    return {"chosen": chosen, "sent": [sent(own) for own in slots], "not_computed": sent([*slots[1], UNUSED])}


def main() -> None:
    layers, experts, topk = map(int, sys.argv[1:])
    print(json.dumps([run(layers, experts, topk, is_virtual) for is_virtual in (False, True)]))


if __name__ == "__main__":
    main()
