"""Count what SGLang's loaders write to each parameter: `python -m tests.rollout.covered_parameters < cases.json`.

A case is {"arguments": ServerArgs, "tensors": {name: [dtype, shape]}}. The model of one rank is built on meta. Prints
{"name": {parameter: [elements loaded, elements]}} as the last line.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.rollout.start_on_meta import build_model, cuda_on_meta, run_cases, set_groups

Counts = dict[str, list[int]]


def cover(case: dict[str, Any]) -> Counts:
    """Return how many elements are loaded to each parameter, beside its size."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**case["arguments"])
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    set_groups(get_parallel())
    model = build_model(server_args)
    counts: Counts = {}
    for name, parameter in model.named_parameters():
        counts[name] = [0, parameter.numel()]
        load = getattr(parameter, "weight_loader", default_weight_loader)
        parameter.weight_loader = partial(_count, counts[name], load)
    tensors = case["tensors"].items()
    with cuda_on_meta():
        model.load_weights(
            (name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")) for name, (dtype, shape) in tensors
        )
    return counts


def _count(count: list[int], load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    count[0] += args[1].numel()
    return load(*args, **options)


if __name__ == "__main__":
    run_cases(cover)
