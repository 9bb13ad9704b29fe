"""What SGLang's own loaders keep of each tensor on each rank: `python -m tests.rollout.record_loaders < cases.json`.

A case is {"arguments": ServerArgs, "rank": int, "tensors": {name: [dtype, shape, stride]}}. The model is built on meta
as that rank of the engine builds it, its loaders get tensors without storage that record what is read of them. Prints
{"name": {tensor: [elements copied, first, last]}} as the last line; first and last are places in memory that are read.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from grpo_mp.rollout.stacked_experts import load_experts
from tests.rollout.start_on_meta import build_model, cuda_on_meta, run_cases, set_groups

Copied = dict[str, list[int]]  # elements, first and last


class RecordedTensor(torch.Tensor):
    """A tensor without storage that knows which loaded tensors it was made from; `copied` has what was read of them.

    `given`: it is a view of the one that was loaded, at whose places it is.
    """

    names: frozenset[str]
    copied: "Copied"
    given: bool

    @staticmethod
    def of(meta: torch.Tensor, names: Iterable[str], copied: "Copied", given: bool) -> "RecordedTensor":
        """Wrap a meta tensor."""
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            RecordedTensor, meta.shape, strides=meta.stride(), dtype=meta.dtype, device="meta"
        )
        tensor.names = frozenset(names)
        tensor.copied = copied
        tensor.meta = meta
        tensor.given = given
        recorded: RecordedTensor = tensor
        return recorded

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, cls)]
        names = frozenset().union(*(tensor.names for tensor in found))
        copied = found[0].copied
        for tensor in () if func.is_view else found:
            tensor._note_read()
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor) and not isinstance(args[0], cls):
            for name in names:
                copied[name][0] += args[1].numel()
            return args[0]
        plain = tree_map_only(cls, lambda tensor: tensor.meta, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        given = func.is_view and all(tensor.given for tensor in found)
        return tree_map_only(torch.Tensor, lambda tensor: cls.of(tensor, names, copied, given), result)

    def _note_read(self) -> None:
        first = self.meta.storage_offset()
        steps = zip(self.meta.shape, self.meta.stride(), strict=True)
        last = first + sum((size - 1) * stride for size, stride in steps)
        for name in self.names if self.given else ():
            known = self.copied.setdefault(name, [0, first, last])
            known[1:] = min(known[1], first), max(known[2], last)


def record(case: dict[str, Any]) -> "Copied":
    """Return what one rank of the engine copies of each tensor into its parameters."""
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    if case["arguments"].get("quantization") == "mxfp8":  # SGLang refuses it on others
        torch.cuda.get_device_capability = lambda *_: (10, 0)
    server_args = ServerArgs(**case["arguments"])
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=case["rank"], gpu_id=0))
    set_groups(get_parallel())
    model = build_model(server_args)
    copied: Copied = {}
    weights = (
        (
            name,
            RecordedTensor.of(
                torch.empty_strided(*sizes, dtype=getattr(torch, dtype), device="meta"), [name], copied, True
            ),
        )
        for name, (dtype, *sizes) in case["tensors"].items()
    )
    with cuda_on_meta():
        model.load_weights(load_experts(model, weights))
    return copied


if __name__ == "__main__":
    run_cases(record)
