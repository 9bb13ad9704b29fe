"""What one GPU computes and moves in a step, and how long the machines need for it at best and as expected."""

from dataclasses import dataclass, replace

from grpo_mp.planner.clusters import Cluster

GIGA = 1e9


@dataclass(frozen=True)
class ResourceUse:
    """What one GPU does in one sub-phase of a step: FLOPs, bytes by link, and seconds that follow from no rate.

    `bubble`: seconds that a pipeline waits for each second of work. The roofline leaves out latency and bubble.
    """

    flops: float = 0.0
    fp8: bool = False
    device_bytes: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    host_link_bytes: float = 0.0
    host_copy_bytes: float = 0.0
    disk_bytes: float = 0.0  # of the node
    latency_s: float = 0.0
    bubble: float = 0.0

    def scaled(self, factor: float) -> "ResourceUse":
        """Return this use `factor` times over."""
        amounts = {name: value * factor for name, value in vars(self).items() if name not in ("fp8", "bubble")}
        return replace(self, **amounts)

    def __add__(self, other: "ResourceUse") -> "ResourceUse":
        """Add up two uses, one after the other; `fp8` and `bubble` are those of the first."""
        names = [name for name in vars(self) if name not in ("fp8", "bubble")]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class TimeEstimate:
    """`parts`: expected seconds by the resource that takes them."""

    roofline_s: float
    parts: dict[str, float]

    @property
    def expected_s(self) -> float:
        return sum(self.parts.values())


def estimate_time(use: ResourceUse, cluster: Cluster) -> TimeEstimate:
    """Estimate the seconds of one sub-phase.

    Roofline: the slowest of all resources at its peak, everything else hidden behind it. Expected: one after the other,
    each at the share of its peak that the profile calls achievable, then bubble and latency.
    """
    peak_flops = (cluster.matmul_tflops(use.fp8) if use.flops else 1.0) * 1e12
    at_peak = {
        "matrix products": use.flops / peak_flops,
        "device memory": use.device_bytes / (cluster.device_memory_gb_s * GIGA),
        "NVLink": use.nvlink_bytes / (cluster.nvlink_gb_s * GIGA),
        "network": use.network_bytes / (cluster.network_gb_s * GIGA),
        "host link": use.host_link_bytes / (cluster.host_link_gb_s * GIGA),
        "host copies": use.host_copy_bytes / (cluster.host_copy_gb_s * GIGA),
        "disk": use.disk_bytes / (cluster.disk_gb_s * GIGA),
    }
    achievable = cluster.achievable
    shares = {"matrix products": achievable.matmul, "device memory": achievable.device_memory, "disk": 1.0}
    parts = {name: seconds / shares.get(name, achievable.link) for name, seconds in at_peak.items() if seconds}
    busy = sum(parts.values())
    parts |= {"waiting in the pipeline": busy * use.bubble} if use.bubble else {}
    parts |= {"latency": use.latency_s} if use.latency_s else {}
    return TimeEstimate(max(at_peak.values()), parts)
