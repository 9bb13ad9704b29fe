"""Offload weights, gradients and optimizer state to the host and onload them, with Megatron's buffers. CUDA only."""

import time
from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from grpo_mp import platform
from grpo_mp.distributed.nccl_memory import NcclMemory
from grpo_mp.platform.pinned import PinnedBuffer
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.utils.errors import PhaseTimeout

POLL_S = 0.05
MARGIN_BYTES = 2**28


def move_optimizer(
    optimizer: torch.optim.Optimizer, onload: bool, host: list[torch.Tensor], with_parameters: bool
) -> None:
    """Move an optimizer's state to pinned host memory or back, and with `with_parameters` also its parameters.

    `host`: tensors in pinned memory, allocated at the first offload; `with_parameters`: parameters are separate main
    weights. Parameters of the precision-aware optimizer are views of the model's weights and must stay.
    """
    tensors = [param for group in optimizer.param_groups for param in group["params"]] if with_parameters else []
    values = (value for state in optimizer.state.values() for value in state.values())
    # Adam's step counts, which are scalars, are not moved.
    tensors += [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    if not host:
        host += PinnedBuffer(tensors).tensors
    for tensor, on_host in zip(tensors, host, strict=True):
        own = tensor.data
        tensor.data = own.to(platform.device(), non_blocking=True) if onload else on_host.copy_(own, non_blocking=True)


def device_items(*models: TrainedModel) -> dict[str, float]:
    """Return the used bytes of this rank's device by kind: weights, gradients, optimizer and others."""
    buffers = [buffer for model in models for buffer in _buffers(model)]
    weights = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    gradients = [buffer.grad_data for buffer in buffers]
    items = {
        "weights": _stored_bytes([*weights, *chain.from_iterable(map(frozen_weights, models))]),
        "gradients": _stored_bytes(gradients),
        "optimizer": _stored_bytes(
            chain.from_iterable(map(_optimizer_tensors, models)), exclude=(*weights, *gradients)
        ),
    }
    allocated = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    rest = allocated - sum(items.values())
    return items | {
        "activations and buffers": max(0.0, rest),
        "kept by the allocator": float(reserved - allocated),
        "engine, communicators and contexts": float(platform.used_device_bytes() - reserved),
    }


def _buffers(policy: TrainedModel):  # type: ignore[no-untyped-def]
    return [buffer for chunk in policy.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def _optimizer_tensors(policy: TrainedModel) -> Iterator[torch.Tensor]:
    for part in policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _stored_bytes(tensors: Iterable[torch.Tensor], exclude: Iterable[torch.Tensor] = ()) -> float:
    """Return the bytes of the distinct device storages of `tensors`, without the storages of `exclude`."""
    device_type = platform.device().type
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device_type)
    sizes = {storage.data_ptr(): storage.size() for storage in storages}
    return float(sum(sizes.values()) - sum(sizes.get(tensor.untyped_storage().data_ptr(), 0) for tensor in exclude))


def frozen_weights(model: TrainedModel) -> list[torch.Tensor]:
    """Return the frozen base weights of a model with adapters, which are in none of Megatron's buffers."""
    return [tensor for name, tensor in model.tensors.items() if name not in model.trained_tensors]


class PolicyOffloader:
    """Offloads and onloads a model's weights, gradients and optimizer state, and suspends NCCL communicators.

    `limit_s`: how long an onload waits for free device memory [s].
    """

    def __init__(self, policy: TrainedModel, limit_s: float, communicators: NcclMemory | None = None) -> None:
        self._policy = policy
        self._limit_s = limit_s
        self._parts = {"policy_weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        if communicators:
            self._parts["communicators"] = communicators.move
        self._offloaded_bytes: dict[str, int] = {}  # part -> device bytes that its onload needs
        self._host_optimizers: list[list[torch.Tensor]] = [[] for _ in policy.optimizer.chained_optimizers]
        frozen = frozen_weights(policy)
        sizes = [tensor.untyped_storage().nbytes() for tensor in frozen]
        self._frozen = list(zip(frozen, PinnedBuffer(frozen).tensors, sizes, strict=True))
        for tensor, on_host, _ in self._frozen:
            on_host.copy_(tensor.detach())
        buffers = _buffers(policy)
        host_weights = PinnedBuffer([buffer.param_data for buffer in buffers]).tensors
        for buffer, on_host in zip(buffers, host_weights, strict=True):
            buffer.param_data_cpu = on_host  # Megatron offloads into this tensor instead of allocating its own

    @torch.no_grad()
    def weights(self, onload: bool) -> None:
        """Offload the model weights to pinned host memory, or onload them. Frozen weights are freed without a copy."""
        for tensor, on_host, nbytes in self._frozen:
            tensor.untyped_storage().resize_(nbytes if onload else 0)
            if onload:
                tensor.copy_(on_host, non_blocking=True)
        for buffer in _buffers(self._policy):
            move = buffer.reload_from_cpu if onload else buffer.offload_to_cpu
            move(move_params=True, move_grads=False)

    def gradients(self, onload: bool) -> None:
        """Free the gradient buffers without a copy, or allocate them again, filled with zeros."""
        for chunk in self._policy.chunks:
            if onload:
                chunk.restore_grad_buffers()
            else:
                chunk.offload_grad_buffers()

    def optimizer(self, onload: bool) -> None:
        for part, host in zip(self._policy.optimizer.chained_optimizers, self._host_optimizers, strict=True):
            moves_parameters = not part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            move_optimizer(part.optimizer, onload, host, moves_parameters)

    def move(self, part: str, onload: bool) -> None:
        """Offload or onload one part, such as "optimizer". An onload first waits for enough free device memory."""
        free_before = platform.free_device_bytes()
        if onload:
            platform.free_device_memory()  # otherwise the allocator's cache would count as used memory
            self._wait_for_memory(part)
        self._parts[part](onload)
        platform.synchronize()
        if not onload:
            platform.free_device_memory()
            self._offloaded_bytes[part] = max(0, platform.free_device_bytes() - free_before)

    def _wait_for_memory(self, part: str) -> None:
        needed = self._offloaded_bytes.get(part, 0) + MARGIN_BYTES
        deadline = time.monotonic() + self._limit_s
        while (free := platform.free_device_bytes()) < needed:
            if time.monotonic() > deadline:
                raise PhaseTimeout(
                    f"rank {self._policy.parallel.rank}: {part} needs {needed / 2**30:.1f} GiB of device memory, "
                    f"{free / 2**30:.1f} GiB were free after {self._limit_s:g} s: the engine has not given its memory "
                    "back, or another process took it: lower engine.args.mem_fraction_static, or end the other"
                )
            time.sleep(POLL_S)
