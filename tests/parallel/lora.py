"""What is measured of adapters in a layout. Each function runs on every rank and returns this rank's part."""

import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from grpo_mp.distributed.shards import tensor_part
from grpo_mp.models.mapping import shard_range
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.trainer.save import export_adapters, export_policy
from tests.parallel.full_model import relative_errors
from tests.parallel.measures import Bench, Result, gradient, resumed, updates

SPREAD = 0.1  # of B, which begins as zero: A would have no gradient
LINEAR = re.compile(r"\.linear_\w+\.weight\d*$")


def folders(checkpoints: Path, case: str) -> tuple[Path, Path]:
    """Where the adapters of a case are for peft, and the weights with them for everyone."""
    return checkpoints / f"{case}_adapter", checkpoints / f"{case}_merged"


def adapters(bench: Bench) -> Result:
    """The gradient of adapters with random B, and what is exported of them."""
    policy, like = bench.policy, bench.settings.model.path
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
            start, stop = shard_range(param, param.shapes[0], policy.tp_sizes()[name], part)
            values = values.narrow(param.tp_dim, start, stop - start)
        tensor.detach().copy_(values)


def adapter_updates(bench: Bench) -> Result:
    """As `updates`, from B that is zero."""
    del bench.policy  # whose B is not
    return updates(bench)


def adapter_resumed(bench: Bench) -> Result:
    """As `resumed`."""
    return resumed(bench)


def fp8_base(bench: Bench) -> Result:
    """Beside weights in FP8, and beside weights in float32 that a formula in float64 has rounded: how far apart?

    Of logprobs, of the adapters' gradient and of what engines get; also how many weights are in FP8, and whether
    replicas are told apart by a factor.
    """
    settings = bench.settings
    lora = settings.model.lora.model_copy(update={"base_dtype": "fp8"})  # type: ignore[union-attr]
    model = settings.model.model_copy(update={"lora": lora})
    in_fp8 = replace(bench, settings=settings.model_copy(update={"model": model}))
    plain = bench.policy
    linear = sorted(name for name in plain.base_params.keys() & plain.tensors if LINEAR.search(name))
    with torch.no_grad():
        for name in linear:
            plain.tensors[name].copy_(rounded(plain.tensors[name]))
    found = []
    for one in (in_fp8, bench):
        fill_b(one.policy)
        logprobs = one.policy.logprobs(one.updates[0])
        found.append((logprobs, gradient(one)["shards"], dict(one.policy.weights)))
    (logprobs, own, merged), (expected_logprobs, expected, expected_merged) = found
    check_replicas(in_fp8.policy, 1)
    return {
        "logprobs": max(
            (float((a - b).abs().max()) for a, b in zip(logprobs, expected_logprobs, strict=True)), default=0.0
        ),
        "gradient": relative_errors(own, expected),
        "merged": relative_errors(merged, expected_merged),
        "in_fp8": sorted(name for name, tensor in in_fp8.policy.tensors.items() if tensor.dtype == torch.float8_e4m3fn),
        "linear": linear,
    }


def rounded(weight: Tensor) -> Tensor:
    """Round blocks of 128 x 128 to e4m3 with factors max|block| / 448 (arXiv 2412.19437, 3.3), in float64.

    e4m3 has 3 bits behind the leading one, down to exponents of -6: below, its values are 2**-9 apart.
    """
    result = weight.detach().double()
    for rows in range(0, weight.shape[0], 128):
        for columns in range(0, weight.shape[1], 128):
            block = result[rows : rows + 128, columns : columns + 128]
            factor = (block.abs().max() / 448).float().double()
            if factor > 0:
                scaled = (block / factor).float().double()  # at a tie, float32 decides
                step = 2.0 ** (scaled.abs().clamp_min(2.0**-6).log2().floor() - 3)
                block.copy_((scaled / step).round() * step * factor)
    return result


MEASURES: dict[str, Callable[[Bench], Result]] = {
    measure.__name__: measure for measure in (adapters, adapter_updates, adapter_resumed, fp8_base)
}
