"""What is measured of adapters in a layout. Each function runs on every rank and returns this rank's part."""

import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_mp.distributed.coordinates import tensor_part
from grpo_mp.models.mapping import shard_ranges
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.save import export_adapters, export_policy
from tests.parallel.measures import Bench, Result, gradient, resumed, updates

SPREAD = 0.1  # of B, which begins as zero: A would have no gradient


def folders(checkpoints: Path, case: str) -> tuple[Path, Path]:
    """Where the adapters of a case are for peft, and the weights with them for everyone."""
    return checkpoints / f"{case}_adapter", checkpoints / f"{case}_merged"


def adapters(bench: Bench) -> Result:
    """The gradient of adapters with random B, and what is exported of them."""
    policy = bench.policy
    like = bench.settings.model.path
    fill_b(policy)
    own, merged = folders(bench.checkpoints, bench.case.name)
    export_adapters(policy, own, like, None)
    export_policy(policy, merged, like, None)
    learned = [tensor.requires_grad for tensor in policy.tensors.values() if tensor.is_leaf]
    return gradient(bench) | {"frozen": learned.count(False), "learned": sum(learned)}


def fill_b(policy: Policy) -> None:
    """Set B, alike in every layout."""
    for name, tensor in policy.trained_tensors.items():
        if ".lora_B." not in name:
            continue
        param = policy.params[name]
        generator = torch.Generator().manual_seed(zlib.crc32(param.hf[0].encode()))
        values = SPREAD * torch.randn(param.shapes[0], generator=generator)
        if param.tp_dim is not None:
            part = tensor_part(param, policy.parallel.coords)
            ranges = shard_ranges(param, 0, policy.tp_sizes()[name], part)
            values = torch.cat(
                [values.narrow(param.tp_dim, start, stop - start) for start, stop in ranges], param.tp_dim
            )
        tensor.detach().copy_(values)


def adapter_updates(bench: Bench) -> Result:
    """As `updates`, from B that is zero."""
    del bench.policy  # whose B is not
    return updates(bench)


def adapter_resumed(bench: Bench) -> Result:
    """As `resumed`."""
    return resumed(bench)


MEASURES: dict[str, Callable[[Bench], Result]] = {
    measure.__name__: measure for measure in (adapters, adapter_updates, adapter_resumed)
}
