"""Cluster profiles, read from YAML, and overheads that libraries have on every machine."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from grpo_mp.utils.errors import UserError, did_you_mean, one_line
from grpo_mp.utils.phases import GIB
from grpo_mp.utils.reading import read_yaml, shorten

PROFILES = Path(__file__).with_name("clusters.yaml")
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
Positive = Annotated[float, Field(gt=0, le=1e12, strict=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]


@dataclass(frozen=True, config=CHECKED)
class Efficiency:
    """Achievable share of each peak rate, by which expected times are computed."""

    matmul: Share
    device_memory: Share
    link: Share


@dataclass(frozen=True, config=CHECKED)
class Cluster:
    """Profile of one kind of node. Rates are per GPU and in one direction; `disk_gb_s` is per node."""

    name: str
    gpu_memory_gib: Positive
    bf16_tflops: Positive
    device_memory_gb_s: Positive
    nvlink_gb_s: Positive
    network_gb_s: Positive
    host_link_gb_s: Positive
    host_copy_gb_s: Positive
    disk_gb_s: Positive
    host_memory_gib: Positive
    gpus_per_node: Annotated[int, Field(ge=1, strict=True)]
    achievable: Efficiency
    fp8_tflops: Positive | None = None

    @property
    def gpu_bytes(self) -> float:
        return self.gpu_memory_gib * GIB

    def peak_fp8_tflops(self) -> float:
        """Return the peak rate of matrix products in FP8 [TFLOP/s]; a profile without this rate is an error."""
        if self.fp8_tflops is None:
            raise UserError(
                f"cluster {self.name}: the plan needs fp8_tflops, which the profile lacks: these GPUs may compute no "
                "FP8; remove engine.args.quantization and training.fp8_format, or state the number"
            )
        return self.fp8_tflops


def read_cluster(name: str) -> Cluster:
    """Read a cluster profile. `name`: a shipped profile, or the path of a YAML file."""
    profiles = _shipped()
    if name in profiles:
        return _parse_profile(name, profiles[name])
    file = Path(name)
    if file.suffix not in (".yaml", ".yml") or not file.exists():
        raise UserError(
            f"cluster {shorten(name)}: no such profile{did_you_mean(name, profiles)}: {', '.join(profiles)}, or a file"
        )
    return _parse_profile(file.stem, read_yaml(file))


def cluster_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles."""
    return tuple(_shipped())


def _shipped() -> dict[str, Any]:
    return yaml.safe_load(PROFILES.read_text())


def _parse_profile(name: str, values: Any) -> Cluster:
    if not isinstance(values, dict):
        raise UserError(f"cluster {name}: expected numbers by name, found {type(values).__name__}")
    try:
        return TypeAdapter(Cluster).validate_python(values | {"name": name})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(shorten(str(part)) for part in first["loc"])
        raise UserError(f"cluster {name}: {key}: {one_line(first['msg'])}") from error


@dataclass(frozen=True)
class Overheads:
    """Measured overheads and assumed ratios. Memory [bytes] per process on a GPU or per rank on a host; times [s]."""

    cuda_context: float = 0.6 * GIB  # CUDA context, cuBLAS workspace, kernel code
    # NCCL buffers of one communicator: 24 channels with 2 connections of 9.2 MiB each for ring and tree, plus a rest.
    communicator: float = 0.56 * GIB
    suspended_in_node: float = 0.1  # share of the buffers that a suspended communicator keeps on the device
    suspended_network: float = 0.5  # that share for groups across nodes: network buffers stay
    engine_nccl: float = 1.0 * GIB  # an engine's tensor-parallel communicators
    deepep_buffers: float = 2.5 * GIB  # 1.9 GiB RDMA for 128 tokens x 7168 x 256 experts, rest NVLink
    cuda_graphs: float = 2.0 * GIB  # static buffers of graphs that are captured up to SGLang's default batch size
    fragmentation: float = 0.03  # allocator fragments, as a share of the trainer's allocations
    trainer_process: float = 4.0 * GIB
    engine_process: float = 5.0 * GIB
    response_log_std: float = 1.0  # standard deviation of the logarithm of a response's length
    expert_imbalance: float = 1.5  # tokens of the busiest expert-parallel rank / mean, in the worst layer
    expert_wait: float = 1.15  # the same on average over layers and micro-batches (assumed)
    activation_gradients: float = 0.5  # gradients in a layer's backward pass / its activations
    mem_fraction_static: float = 0.8  # assumed if engine.args do not set it
    draft_acceptance: float = 0.7  # assumed probability p that an MTP draft is accepted if all before it were
    decode_collective_s: float = 20e-6  # small collective in a decode step, within a node or by DeepEP
    network_collective_s: float = 60e-6  # small NCCL all-reduce across nodes
    decode_layer_s: float = 60e-6  # kernel launches of one layer in a decode step
    eager_layer_s: float = 2e-3  # kernel launches of one layer of a forward pass without CUDA graphs
    engine_request_s: float = 0.02  # one HTTP request to an engine
    engine_memory_s: float = 0.2  # an engine releases or reallocates its weights, or its KV cache
    host_collective_s: float = 5e-3  # small gloo collective of all ranks
    sync_tensor_s: float = 1e-4  # Python time of SGLang to load one tensor
    sync_unevenness: float = 1.85  # sum over rounds of the busiest rank's bytes / bytes of the busiest rank overall


OVERHEADS = Overheads()
