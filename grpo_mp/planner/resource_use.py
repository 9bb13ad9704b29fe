"""What one GPU computes and moves in a step, and how long the machines need for it at best and as expected."""

from dataclasses import dataclass, replace

from grpo_mp.planner.clusters import Cluster
from grpo_mp.planner.overheads import OVERHEADS

GIGA = 1e9


@dataclass(frozen=True)
class Work:
    """Of one GPU in one stretch of a step: operations, bytes by the way they take, and seconds that no rate explains.

    `idle`: time that passes for every second of work, in which a pipeline waits. The roofline counts neither.
    """

    flops: float = 0.0
    fp8: bool = False
    device_bytes: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    host_link_bytes: float = 0.0
    host_copy_bytes: float = 0.0
    disk_bytes: float = 0.0  # of the whole node
    latency_s: float = 0.0
    idle: float = 0.0

    def times(self, factor: float) -> "Work":
        """The same, `factor` times over."""
        scaled = {name: value * factor for name, value in vars(self).items() if name not in ("fp8", "idle")}
        return replace(self, **scaled)

    def __add__(self, other: "Work") -> "Work":
        """Both, one after the other; rates and idle time are those of the first."""
        names = [name for name in vars(self) if name not in ("fp8", "idle")]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Time:
    """`parts`: expected seconds by what takes them."""

    roofline_s: float
    parts: dict[str, float]

    @property
    def expected_s(self) -> float:
        return sum(self.parts.values())


def time_of(work: Work, cluster: Cluster) -> Time:
    """Roofline: the slowest of all resources at its peak, everything else hidden behind it.

    Expected: one after the other, each at the share of its peak that the profile calls achievable, and the idle time.
    """
    ideal = _seconds(work, cluster)
    share = cluster.achievable
    slower = {"matrix products": share.matmul, "device memory": share.device_memory, "disk": 1.0}
    parts = {name: seconds / slower.get(name, share.link) for name, seconds in ideal.items() if seconds}
    busy = sum(parts.values())
    parts |= {"waiting in the pipeline": busy * work.idle} if work.idle else {}
    parts |= {"latency": work.latency_s} if work.latency_s else {}
    return Time(max(ideal.values()), parts)


def _seconds(work: Work, cluster: Cluster) -> dict[str, float]:
    tera = cluster.matmul_tflops(work.fp8) if work.flops else 1.0
    return {
        "matrix products": work.flops / (tera * 1e12),
        "device memory": work.device_bytes / (cluster.device_memory_gb_s * GIGA),
        "NVLink": work.nvlink_bytes / (cluster.nvlink_gb_s * GIGA),
        "network": work.network_bytes / (cluster.network_gb_s * GIGA),
        "host link": work.host_link_bytes / (cluster.host_link_gb_s * GIGA),
        "host copies": work.host_copy_bytes / (cluster.host_copy_gb_s * GIGA),
        "disk": work.disk_bytes / (cluster.disk_gb_s * GIGA),
    }


def decode_latency_s(layers: int, collectives: int) -> float:
    """Of one token: launches of every layer, and its small collectives."""
    return layers * (OVERHEADS.kernels_s + collectives * OVERHEADS.collective_s)
