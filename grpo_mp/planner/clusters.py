"""Cluster profiles: memory and rates of a kind of node, read from YAML and checked by name."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from grpo_mp.config.load import read_yaml
from grpo_mp.errors import UserError, nearest

PROFILES = Path(__file__).with_name("clusters.yaml")
GIB = 2**30


@dataclass(frozen=True)
class Efficiency:
    """Shares of peak rates that expected times assume."""

    matmul: float
    device_memory: float
    link: float


@dataclass(frozen=True)
class Cluster:
    """One kind of node. Rates are those of one GPU in one direction, of the disk those of one node."""

    name: str
    gpu_memory_gib: float
    bf16_tflops: float
    fp8_tflops: float | None
    device_memory_gb_s: float
    nvlink_gb_s: float
    network_gb_s: float
    host_link_gb_s: float
    host_copy_gb_s: float
    disk_gb_s: float
    host_memory_gib: float
    gpus_per_node: int
    achievable: Efficiency

    @property
    def gpu_bytes(self) -> float:
        return self.gpu_memory_gib * GIB

    @property
    def host_bytes(self) -> float:
        return self.host_memory_gib * GIB

    def matmul_tflops(self, fp8: bool) -> float:
        """Return the peak rate. Raises UserError where the profile has no FP8 rate."""
        if fp8 and self.fp8_tflops is None:
            raise UserError(
                f"cluster {self.name}: the plan needs fp8_tflops, which the profile lacks: these GPUs may compute no "
                "FP8; remove engine.args.quantization, or state the number"
            )
        return (self.fp8_tflops if fp8 else self.bf16_tflops) or self.bf16_tflops


def read_cluster(name: str) -> Cluster:
    """Read a shipped profile by its name, or the profile in a YAML file.

    Raises UserError where the name is unknown, or a number is missing or wrong.
    """
    profiles = yaml.safe_load(PROFILES.read_text())
    if name in profiles:
        return _parse_profile(name, profiles[name])
    file = Path(name)
    if file.suffix not in (".yaml", ".yml") or not file.is_file():
        raise UserError(f"cluster {name}: no such profile{nearest(name, profiles)}: {', '.join(profiles)}, or a file")
    return _parse_profile(file.stem, read_yaml(file))


def cluster_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(yaml.safe_load(PROFILES.read_text()))


def describe_rates(cluster: Cluster) -> str:
    """Format the shares that expected times assume."""
    return ", ".join(f"{name} {share:.0%}" for name, share in asdict(cluster.achievable).items())


def _parse_profile(name: str, values: Any) -> Cluster:
    if not isinstance(values, dict):
        raise UserError(f"cluster {name}: expected numbers by name, found {type(values).__name__}")
    required = {field.name for field in fields(Cluster)} - {"name"}
    shares = values.get("achievable")
    _check_numbers(name, values, required, optional={"fp8_tflops"})
    if not isinstance(shares, dict):
        raise UserError(f"cluster {name}: achievable must give shares by name: matmul, device_memory, link")
    _check_numbers(name, shares, {field.name for field in fields(Efficiency)})
    return Cluster(name=name, **{**values, "fp8_tflops": values.get("fp8_tflops"), "achievable": Efficiency(**shares)})


def _check_numbers(
    name: str, values: dict[str, Any], required: set[str], optional: Collection[str] = frozenset()
) -> None:
    for key in sorted(required):
        value = values.get(key)
        if value is None and key not in optional:
            raise UserError(f"cluster {name}: the plan needs {key}, which the profile lacks: add it")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key != "achievable" and value is not None and not (is_number and value > 0):
            raise UserError(f"cluster {name}: {key}={value!r} is not a number above 0")
    for key in values:
        if key not in required:
            raise UserError(f"cluster {name}: unknown number {key}{nearest(str(key), required)}")
