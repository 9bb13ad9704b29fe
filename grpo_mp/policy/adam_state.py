"""Adam's state: created before the first update, saved without copies, and optionally kept in host memory.

TransformerEngine's precision-aware Adam may store only the remainder of a float32 main weight: the lower 16 bits, which
the bfloat16 weight lacks.

With `optimizer.offload=host` the state stays in pinned host memory. `HostState.step` updates it on the device piece by
piece: while TransformerEngine's step updates one piece, the next piece is copied to the device and the previous one
back. Adam is elementwise, so the result is bitwise equal to an update of the whole state.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from grpo_mp import platform
from grpo_mp.platform import fake_cuda
from grpo_mp.platform.pinned import ALIGNMENT, PinnedBuffer, aligned_bytes, carve

NUM_BUFFERS = 2  # one piece is copied to the device while another is updated and copied back
State = Mapping[str, Tensor]


def init_state(part: MegatronOptimizer) -> None:
    """Create the moments and main weights, so that a checkpoint can be saved before the first update."""
    adam = part.optimizer
    if not part.config.use_precision_aware_optimizer:
        part.init_state_fn(adam, part.config)
        return
    for group in adam.param_groups:  # Megatron's init_state_fn does not pass store_remainder to initialize_state
        for param in group["params"]:
            if not adam.state[param]:
                adam.initialize_state(param, stores_remainder(adam, param))


@contextmanager
def state_dict_without_copies(parts: Sequence[MegatronOptimizer]) -> Iterator[None]:
    """Inside the context, make Adam's state_dict return tensors uncopied and load_state_dict load only param groups.

    Megatron calls both and uses only the param groups. TransformerEngine would copy all moments to float32 in each
    state_dict (8 bytes per parameter with bfloat16 moments), and cast the state in load_state_dict (6 bytes).
    """

    def load_groups(adam: Any, saved: dict[str, Any]) -> None:
        for group, loaded in zip(adam.param_groups, saved["param_groups"], strict=True):
            group |= {name: value for name, value in loaded.items() if name != "params"}

    adams = [part.optimizer for part in parts]
    for adam in adams:
        adam.state_dict = partial(torch.optim.Optimizer.state_dict, adam)
        adam.load_state_dict = partial(load_groups, adam)
    try:
        yield
    finally:
        for adam in adams:
            del adam.state_dict, adam.load_state_dict


def stores_param_remainders(parts: list[MegatronOptimizer]) -> bool:
    """Return whether the optimizer stores remainders instead of whole main weights."""
    return any(
        stores_remainder(part.optimizer, param)
        for part in parts
        if part.config.use_precision_aware_optimizer
        for group in part.optimizer.param_groups
        for param in group["params"]
    )


def stores_remainder(adam: Any, param: torch.Tensor) -> bool:
    """Return whether TransformerEngine's Adam stores a remainder of `param` instead of its whole main weight."""
    return bool(adam.store_param_remainders) and param.dtype == torch.bfloat16


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of one flat parameter. `view`: their weights on the device; `host`: their Adam state."""

    param: Any  # a tensor; Megatron stores its gradient in the attribute `decoupled_grad`
    start: int
    stop: int
    view: Any
    host: State


@dataclass(frozen=True)
class Piece:
    """Slices of one param group whose state is copied to the device and updated together."""

    group: int  # index of the param group
    slices: Sequence[Slice]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.slices for tensor in part.host.values()]


def divide(sizes: Sequence[int], bytes_per_element: int, piece_bytes: int) -> list[list[tuple[int, int, int]]]:
    """Divide tensors of `sizes` elements into pieces of at most `piece_bytes`.

    Return a list of (tensor index, start, stop) for each piece.
    """
    capacity = piece_bytes // bytes_per_element // ALIGNMENT * ALIGNMENT
    if not capacity:
        raise ValueError(f"a piece of {piece_bytes} bytes cannot hold {ALIGNMENT} elements of {bytes_per_element}")
    pieces: list[list[tuple[int, int, int]]] = []
    room = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                pieces.append([])
                room = capacity
            stop = min(size, start + room)
            pieces[-1].append((index, start, stop))
            room -= -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            start = stop
    return pieces


class HostState:
    """Pinned host memory for the state of one TransformerEngine Adam, and the step that updates it on the device."""

    def __init__(self, adam: Any, piece_bytes: int) -> None:
        self._adam = adam
        self._step_on_device = adam.step
        _allocate_state(adam)
        self._pieces = _pieces(adam, piece_bytes)
        for part in (part for piece in self._pieces for part in piece.slices):
            # Adam looks up a scale for each tensor that it initialized, so each view must be initialized once.
            adam.initialize_state(part.view, stores_remainder(adam, part.view))
            for name, tensor in adam.state.pop(part.view).items():
                part.host[name].copy_(tensor)
        sizes = [sum(map(aligned_bytes, piece.tensors)) for piece in self._pieces]
        self._largest_piece = max(sizes, default=0)

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights that have a gradient; return once the new state is on the host."""
        cuda: Any = torch.cuda if platform.on_cuda() else fake_cuda
        compute = cuda.current_stream()
        arriving = cuda.Stream()
        leaving = cuda.Stream()
        flat = partial(torch.empty, self._largest_piece, dtype=torch.uint8, device=platform.device())
        buffers = [flat() for _ in range(NUM_BUFFERS)]
        empty = [compute.record_event() for _ in buffers]
        for number, piece in enumerate(self._pieces):
            slot = number % NUM_BUFFERS
            on_device = carve(buffers[slot], piece.tensors)
            arriving.wait_event(empty[slot])
            with cuda.stream(arriving):
                for tensor, host in zip(on_device, piece.tensors, strict=True):
                    tensor.copy_(host, non_blocking=True)
            compute.wait_event(arriving.record_event())
            self._update(piece, on_device)
            leaving.wait_event(compute.record_event())
            with cuda.stream(leaving):
                for tensor, host in zip(on_device, piece.tensors, strict=True):
                    host.copy_(tensor, non_blocking=True)
            empty[slot] = leaving.record_event()
        for group in self._adam.param_groups:
            group["step"] = group.get("step", 0) + 1
        leaving.synchronize()

    def _update(self, piece: Piece, on_device: Sequence[Tensor]) -> None:
        """Run Adam's step on one piece, without changing the param groups or their step counts."""
        adam = self._adam
        groups = self._adam.param_groups
        tensors = iter(on_device)
        for part in piece.slices:
            gradient = part.param.decoupled_grad
            part.view.decoupled_grad = None if gradient is None else gradient[part.start : part.stop]
            adam.state[part.view] = {name: next(tensors) for name in part.host}
        adam.param_groups = [groups[piece.group] | {"params": [part.view for part in piece.slices]}]
        try:
            self._step_on_device()
        finally:
            adam.param_groups = groups
            for part in piece.slices:
                part.view.decoupled_grad = None
                del adam.state[part.view]


def _allocate_state(adam: Any) -> None:
    names = [
        (param, name, dtype)
        for group in adam.param_groups
        for param in group["params"]
        for name, dtype in _state_dtypes(adam, param).items()
    ]
    buffer = PinnedBuffer([torch.empty_like(param, dtype=dtype, device="meta") for param, _, dtype in names])
    for (param, name, _), tensor in zip(names, buffer.tensors, strict=True):
        adam.state[param][name] = tensor


@torch.no_grad()
def _pieces(adam: Any, piece_bytes: int) -> list[Piece]:
    pieces = []
    for number, group in enumerate(adam.param_groups):
        params = group["params"]
        sizes = [sum(dtype.itemsize for dtype in _state_dtypes(adam, param).values()) for param in params]
        for slices in divide([param.numel() for param in params], max(sizes, default=1), piece_bytes):
            parts = []
            for index, start, stop in slices:
                host = {name: tensor[start:stop] for name, tensor in adam.state[params[index]].items()}
                parts.append(Slice(params[index], start, stop, params[index][start:stop], host))
            pieces.append(Piece(number, parts))
    return pieces


def _state_dtypes(adam: Any, param: Tensor) -> dict[str, torch.dtype]:
    return adam.name_to_dtype_map | ({"master_param": torch.int16} if stores_remainder(adam, param) else {})
