"""What SGLang asks of a GPU, answered on a machine without one: as an H100 of 80 GB in a node of eight would.

Everything else is SGLang's own. What is replaced, whole:

- `torch.cuda`: what the device is, how many there are, how much memory is free; streams and events, which do nothing;
- packages with kernels that have no CPU build: they import, and fail where they are called; a Blackwell kernel, whose
  module compiles it at import, says as on an H100 that it is of no use;
- process groups: a size and a rank, no connection;
- tensors on "cuda" are on meta: shapes and dtypes without memory.

Import this before SGLang, in a process of its own, with the engine's folder of stand-ins first on the path.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from torch.overrides import TorchFunctionMode

GIB = 2**30
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * GIB,
    multi_processor_count=132,
    warp_size=32,
    uuid="GPU-0",
)
GPUS_PER_NODE = 8
KERNEL_PACKAGES = ("deep_ep", "deep_gemm", "torch_memory_saver")
BLACKWELL_KERNEL = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"
PARALLEL_FIELDS = {  # group -> the fields of SGLang's parallel state that hold its size and this process's rank in it
    "world_group": ("tp_size", "tp_rank"),
    "tp_group": ("tp_size", "tp_rank"),
    "pp_group": ("pp_size", "pp_rank"),
    "moe_ep_group": ("moe_ep_size", "moe_ep_rank"),
    "moe_tp_group": ("moe_tp_size", "moe_tp_rank"),
    "moe_dp_group": ("moe_dp_size", "moe_dp_rank"),
    "attn_tp_group": ("attn_tp_size", "attn_tp_rank"),
    "attn_cp_group": ("attn_cp_size", "attn_cp_rank"),
}


class NullStream:
    """A stream or an event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass(frozen=True)
class FakeGroup:
    """One rank's view of a process group that nobody joined."""

    world_size: int
    rank_in_group: int
    local_rank: int = 0
    device_group: None = None

    @property
    def cpu_group(self) -> "FakeGroup":
        return self

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


def fake_h100() -> None:
    """Replace what torch.cuda answers in this process, for good."""
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "device_count": GPUS_PER_NODE,
        "current_device": 0,
        "get_device_properties": H100,
        "get_device_name": H100.name,
        "get_device_capability": (H100.major, H100.minor),
        "mem_get_info": (H100.total_memory - GIB, H100.total_memory),
        "set_device": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.get_device_module = lambda *_: torch.cuda
    torch.cuda.Stream = torch.cuda.Event = NullStream  # type: ignore[misc,assignment]
    import sitecustomize  # the engine's stand-ins

    sitecustomize.STAND_INS = (*sitecustomize.STAND_INS, *KERNEL_PACKAGES)
    kernel = ModuleType(BLACKWELL_KERNEL)
    vars(kernel).update(
        MAX_DUAL_GEMM_DECODE_TOKENS=0, DualGemmQuantMode=Mock(), can_use_dual_gemm=lambda *_, **__: False
    )
    sys.modules[BLACKWELL_KERNEL] = kernel


def set_groups(parallel: Any) -> None:
    """Give SGLang's parallel state, which knows its sizes and ranks, groups of them."""
    from sglang.srt.distributed import parallel_state

    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [
        rank // GPUS_PER_NODE == source_rank // GPUS_PER_NODE for rank in range(group.world_size)
    ]
    groups = {
        group: FakeGroup(getattr(parallel, size), getattr(parallel, rank))
        for group, (size, rank) in PARALLEL_FIELDS.items()
    }
    parallel.override_permanently(**groups)


@contextmanager
def cuda_on_meta() -> Iterator[None]:
    """Make tensors without memory in the body, also where the caller says "cuda"."""
    with torch.device("meta"), _MetaForCudaMode():
        yield


class _MetaForCudaMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _meta_for_cuda(value) for name, value in (kwargs or {}).items()}
        return func(*map(_meta_for_cuda, args), **named)


def _meta_for_cuda(value: Any) -> Any:
    return "meta" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


def disable_other_models(kept: tuple[str, ...]) -> None:
    """Let SGLang import only the models of these files: all of them take ten seconds."""
    import sglang.srt.models as models

    names = {name.removesuffix(".py") for name in os.listdir(models.__path__[0])}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(names - set(kept)))
