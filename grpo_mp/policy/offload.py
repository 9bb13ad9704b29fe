"""The policy's way off the device and back, part by part, with Megatron's own buffers. CUDA only."""

import time
from collections.abc import Iterable, Iterator

import torch

from grpo_mp import platform
from grpo_mp.errors import PhaseTimeout
from grpo_mp.policy.policy import Policy

POLL_S = 0.05
MARGIN_BYTES = 2**28


class HostCopies:
    """Page-locked host memory of what one optimizer keeps; made once, so that a move runs at the host link's rate."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def release(self) -> None:
        """Give the memory back; the next move off the device makes it again. Call it while the state is there."""
        self._kept.clear()

    def move(self, name: tuple[str, int], value: torch.Tensor, to: torch.device) -> torch.Tensor:
        """The tensor on a device; the copy may still be under way when it is given back."""
        if to.type != "cpu":
            return value.to(to, non_blocking=True)
        if value.device.type == "cpu":
            return value
        if name not in self._kept:
            self._kept[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=platform.on_cuda())
        return self._kept[name].copy_(value, non_blocking=True)


def move_optimizer(
    optimizer: torch.optim.Optimizer, to: torch.device, copies: HostCopies, with_parameters: bool
) -> None:
    """Move what an optimizer keeps for its parameters, and with a flag the parameters: main weights of its own.

    Those of the precision-aware optimizer are views of the model's weights: updates would then change copies that no
    one reads.
    """
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = copies.move((name, number), value, to)
    if with_parameters:
        params = (param for group in optimizer.param_groups for param in group["params"])
        for number, param in enumerate(params):
            param.data = copies.move(("parameter", number), param.data, to)


def device_items(policy: Policy) -> dict[str, float]:
    """Bytes on this rank's device by what they are; what is neither state of the policy is activations and buffers."""
    buffers = _buffers(policy)
    weights = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    gradients = [buffer.grad_data for buffer in buffers]
    items = {
        "weights": _stored_bytes(weights),
        "gradients": _stored_bytes(gradients),
        "optimizer": _stored_bytes(_optimizer_tensors(policy), but=(*weights, *gradients)),
    }
    rest = platform.device_bytes() - sum(items.values())
    return items | {"activations and buffers": max(0.0, rest), "kept by the allocator": platform.cached_bytes()}


def _buffers(policy: Policy):  # type: ignore[no-untyped-def]
    return [buffer for chunk in policy.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def _optimizer_tensors(policy: Policy) -> Iterator[torch.Tensor]:
    for part in policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _stored_bytes(tensors: Iterable[torch.Tensor], but: Iterable[torch.Tensor] = ()) -> float:
    """Of those on the device, each stretch of memory once, without the memory of `but`."""
    coords = platform.device().type
    sizes = {
        one.untyped_storage().data_ptr(): one.untyped_storage().size() for one in tensors if one.device.type == coords
    }
    return float(sum(sizes.values()) - sum(sizes.get(one.untyped_storage().data_ptr(), 0) for one in but))


class PolicyOffloader:
    """Moves weights, gradients and optimizer between device and host."""

    def __init__(self, policy: Policy, limit_s: float) -> None:
        """`limit_s`: how long to wait for device memory that another process is about to give back."""
        self._policy, self._limit_s = policy, limit_s
        self._away: dict[str, int] = {}  # part -> bytes it will need again
        self._awake = {"policy_weights", "gradients", "optimizer"}
        self._copies = [HostCopies() for _ in policy.optimizer.chained_optimizers]

    def weights(self, wake: bool) -> None:
        """Model weights: copied to pinned host memory, freed here."""
        for buffer in _buffers(self._policy):
            if wake:
                buffer.reload_from_cpu(move_params=True, move_grads=False)
            else:
                buffer.offload_to_cpu(move_params=True, move_grads=False)

    def gradients(self, wake: bool) -> None:
        """Gradient buffers: freed, never copied; they come back as zeros."""
        for chunk in self._policy.chunks:
            if wake:
                chunk.restore_grad_buffers()
            else:
                chunk.offload_grad_buffers()

    def optimizer(self, wake: bool) -> None:
        """Main weights and moments: copied to pinned host memory, freed here."""
        to = platform.device() if wake else torch.device("cpu")
        for part, copies in zip(self._policy.optimizer.chained_optimizers, self._copies, strict=True):
            move_optimizer(part.optimizer, to, copies, not part.config.use_precision_aware_optimizer)

    def move(self, part: str, wake: bool) -> None:
        """Move one part; before waking wait until the device really has the memory that the part left."""
        before = platform.free_device_bytes()
        if wake:
            platform.free_device_memory()  # what this process only keeps for itself would count as taken
            self._wait_for(part)
        {"policy_weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}[part](wake)
        platform.synchronize()
        self._note(part, wake)
        if not wake:
            platform.free_device_memory()
            self._away[part] = max(0, platform.free_device_bytes() - before)

    def _note(self, part: str, wake: bool) -> None:
        """An optimizer without gradients is there to be saved: the checkpoint needs the host memory of its copies."""
        self._awake = self._awake | {part} if wake else self._awake - {part}
        if wake and part == "optimizer" and "gradients" not in self._awake:
            for copies in self._copies:
                copies.release()

    def _wait_for(self, part: str) -> None:
        needed = self._away.get(part, 0) + MARGIN_BYTES
        deadline = time.monotonic() + self._limit_s
        while (free := platform.free_device_bytes()) < needed:
            if time.monotonic() > deadline:
                raise PhaseTimeout(
                    f"rank {self._policy.parallel.rank}: {part} needs {needed / 2**30:.1f} GiB of device memory, "
                    f"{free / 2**30:.1f} GiB were free after {self._limit_s:g} s: the engine has not given its memory "
                    "back, or another process took it: lower engine.args.mem_fraction_static, or end the other"
                )
            time.sleep(POLL_S)
