"""What one GPU computes and moves in a phase, and how long that takes at best and as expected, term by term."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_mp.planner.clusters import Cluster

GIGA = 1e9
TERA = 1e12
FIRST_OF_SUM = ("fp8", "bubble")  # fields that a sum takes from its first operand


@dataclass(frozen=True)
class Wait:
    """Something that takes `seconds` each time, whatever the machine's rates, and happens `count` times."""

    name: str
    count: float
    seconds: float


@dataclass(frozen=True)
class ResourceUse:
    """What one GPU does in one sub-phase of a step: FLOPs, bytes by link, and waits that follow from no rate.

    `parts`: what it does besides, under names of their own, after the rest. `bubble`: seconds that a pipeline waits for
    each second of work. The roofline leaves out waits and bubble.
    """

    flops: float = 0.0
    fp8: bool = False
    fp8_flops: float = 0.0  # besides `flops`, whatever `fp8` says of those
    device_bytes: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    host_link_bytes: float = 0.0
    host_copy_bytes: float = 0.0
    disk_bytes: float = 0.0  # of the node
    waits: tuple[Wait, ...] = ()
    parts: tuple["Part", ...] = ()
    bubble: float = 0.0

    def scaled(self, factor: float) -> "ResourceUse":
        """Return this use `factor` times over."""
        waits = tuple(replace(wait, count=wait.count * factor) for wait in self.waits)
        parts = tuple(replace(part, use=part.use.scaled(factor)) for part in self.parts)
        others = (*FIRST_OF_SUM, "waits", "parts")
        amounts = {name: value * factor for name, value in vars(self).items() if name not in others}
        return replace(self, **amounts, waits=waits, parts=parts)

    def __add__(self, other: "ResourceUse") -> "ResourceUse":
        """Add up two uses, one after the other; `fp8` and `bubble` are those of the first."""
        names = [name for name in vars(self) if name not in FIRST_OF_SUM]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Part:
    """Something in a sub-phase whose seconds are to be seen by its name."""

    name: str
    use: ResourceUse


@dataclass(frozen=True)
class Term:
    """A part of a time: `amount` / (`rate` x `share`), or a count of waits; `what` says it in words."""

    resource: str
    what: str
    expected_s: float
    roofline_s: float = 0.0


@dataclass(frozen=True)
class TimeEstimate:
    """The seconds of a sub-phase as terms, which happen one after the other."""

    terms: tuple[Term, ...]

    @property
    def roofline_s(self) -> float:
        """Return the seconds of the slowest resource at its peak, everything else hidden behind it."""
        return max((term.roofline_s for term in self.terms), default=0.0)

    @property
    def expected_s(self) -> float:
        """Return the expected seconds, all terms one after the other."""
        return sum(term.expected_s for term in self.terms)

    @property
    def parts(self) -> Mapping[str, float]:
        """Return the expected seconds by the resource that takes them."""
        seconds: dict[str, float] = defaultdict(float)
        for term in self.terms:
            seconds[term.resource] += term.expected_s
        return dict(seconds)


def estimate_time(use: ResourceUse, cluster: Cluster) -> TimeEstimate:
    """Estimate the seconds of one sub-phase: each resource at the share of its peak that the profile calls achievable,
    then what waits for a pipeline, then waits, then the parts that have names."""
    achievable = cluster.achievable
    tflops = cluster.matmul_tflops(use.fp8) if use.flops else cluster.bf16_tflops
    products = _term(
        "matrix products", use.flops / TERA, unit="TFLOP", rate=tflops, rate_unit="TFLOP/s", share=achievable.matmul
    )
    rated = [
        products,
        *_fp8_products(use.fp8_flops, cluster, products.roofline_s),
        *(
            _term(name, size / GIGA, unit="GB", rate=rate, rate_unit="GB/s", share=share)
            for name, size, rate, share in (
                ("device memory", use.device_bytes, cluster.device_memory_gb_s, achievable.device_memory),
                ("NVLink", use.nvlink_bytes, cluster.nvlink_gb_s, achievable.link),
                ("network", use.network_bytes, cluster.network_gb_s, achievable.link),
                ("host link", use.host_link_bytes, cluster.host_link_gb_s, achievable.link),
                ("host copies", use.host_copy_bytes, cluster.host_copy_gb_s, achievable.link),
                ("disk", use.disk_bytes, cluster.disk_gb_s, 1.0),
            )
        ),
    ]
    busy = sum(term.expected_s for term in rated)
    idle = Term("waiting in the pipeline", f"{busy:,.1f} s of work x {use.bubble:.1%}", busy * use.bubble)
    waits = [
        Term("latency", f"{_count(wait.count)} {wait.name} x {wait.seconds * 1e6:,.0f} us", wait.count * wait.seconds)
        for wait in use.waits
    ]
    named = [
        replace(term, what=f"{part.name}: {term.what}")
        for part in use.parts
        for term in estimate_time(part.use, cluster).terms
    ]
    return TimeEstimate(tuple(term for term in (*rated, idle, *waits, *named) if term.expected_s))


def _fp8_products(flops: float, cluster: Cluster, others_s: float) -> list[Term]:
    """Return the products in FP8, whose roofline is above `others_s` of the same cores."""
    if not flops:
        return []
    rate, share = cluster.matmul_tflops(fp8=True), cluster.achievable.matmul
    term = _term("matrix products", flops / TERA, unit="TFLOP in FP8", rate=rate, rate_unit="TFLOP/s", share=share)
    return [replace(term, roofline_s=term.roofline_s + others_s)]


def _term(resource: str, amount: float, unit: str, rate: float, rate_unit: str, share: float) -> Term:
    what = f"{amount:,.1f} {unit} at {share:.0%} of {rate:,.0f} {rate_unit}"
    return Term(resource, what, amount / (rate * share), amount / rate)


def _count(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
