"""Dynamic micro-batches: balance sequences over data-parallel ranks. Pure: no tensors, no process groups.

Pipeline schedules and expert parallelism need the same number K of micro-batches on every rank, and synchronize the
ranks in each. So the plan makes `dp_size * K` bins of similar cost and lets the most similar run together.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cost:
    """Time of a sequence of n tokens, in any unit: linear * n + quadratic * n**2.

    For a dense transformer quadratic / linear is near 1 / (12 * hidden_size).
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def time(self, length: int, prefix: int = 0) -> float:
        """Return the time of a sequence whose tokens attend to `prefix` other tokens, too."""
        return self.linear * length + self.quadratic * length * (2 * prefix + length)


@dataclass(frozen=True)
class SharedPrompt:
    """`tokens` of a prompt that the next `samples` samples of a micro-batch share, padded to `length`."""

    samples: int
    tokens: int
    length: int


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which samples are packed together. Without samples the caller runs a dummy sequence in its place."""

    samples: tuple[int, ...] = ()  # indices into the lengths that were planned
    lengths: tuple[int, ...] = ()  # padded length of each, in tokens, without what it shares
    prompts: tuple[SharedPrompt, ...] = ()  # of all samples, in their order; (): none is shared
    pad_to: int = 0  # tokens of the micro-batch at least

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + sum(prompt.length for prompt in self.prompts)


@dataclass(frozen=True)
class MicroBatchSchedule:
    """`ranks[r][k]` is the k-th micro-batch of data-parallel rank r; all ranks have equally many."""

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]
    align: int  # every padded length is a multiple of it

    @property
    def microbatches(self) -> int:
        """Return the micro-batches of one rank; all have equally many."""
        return len(self.ranks[0])

    def padded_to_multiple(self, multiple: int) -> "MicroBatchSchedule":
        if multiple == 1:
            return self

        def pad(plan: MicroBatchPlan) -> MicroBatchPlan:
            return replace(plan, pad_to=round_up(plan.tokens or self.align, multiple))

        return replace(self, ranks=tuple(tuple(map(pad, plans)) for plans in self.ranks))


def plan_microbatches(
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    align: int,
    multiple: int = 1,
    costs: Sequence[float] = (),
) -> MicroBatchSchedule:
    """Put every sample into one micro-batch of one rank; equal input gives an equal plan.

    `lengths` are tokens of prompt and response. A micro-batch holds at most `max_tokens` padded tokens, except that a
    longer sequence gets one of its own. The number of micro-batches is a multiple of `multiple`, as small as packing
    allows. `costs` of the samples are balanced (default: their tokens).
    Raises ValueError for sizes below 1.
    """
    if min(dp_size, max_tokens, align, multiple) < 1 or any(length < 1 for length in lengths):
        raise ValueError("lengths, dp_size, max_tokens, align and multiple must be at least 1")
    padded = [round_up(length, align) for length in lengths]
    costs = costs or padded
    longest_first = sorted(range(len(padded)), key=lambda sample: (-padded[sample], sample))
    fitting = sum(length for length in padded if length <= max_tokens)
    min_microbatches = sum(length > max_tokens for length in padded) + -(-fitting // max_tokens)
    count = max(multiple, round_up(-(-min_microbatches // dp_size), multiple))  # micro-batches of each rank
    by_first_fit = first_fit(longest_first, padded, max_tokens)
    while (
        bins := _least_loaded(longest_first, padded, bins=dp_size * count, max_tokens=max_tokens, costs=costs)
    ) is None:
        empty = dp_size * count - len(by_first_fit)
        if empty >= 0:
            bins = [*by_first_fit, *([] for _ in range(empty))]
            break
        count += multiple
    return MicroBatchSchedule(_assign_to_ranks(bins, padded, dp_size, costs), align)


def round_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than `tokens`."""
    return -(-tokens // multiple) * multiple


def _least_loaded(
    order: list[int], padded: list[int], bins: int, max_tokens: int, costs: Sequence[float]
) -> list[list[int]] | None:
    """Put the longest first, each into the cheapest bin that has room."""
    contents: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0.0, 0, index) for index in range(bins)]  # cost, tokens, bin
    for sample in order:
        popped = []
        while heap and heap[0][1] and heap[0][1] + padded[sample] > max_tokens:
            popped.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, tokens, index = heapq.heappop(heap)
        contents[index].append(sample)
        popped.append((cost + costs[sample], tokens + padded[sample], index))
        for entry in popped:
            heapq.heappush(heap, entry)
    return contents


def first_fit(order: Iterable[int], sizes: Sequence[int] | Mapping[int, int], capacity: int) -> list[list[int]]:
    """Put items, in order, each into the first bin that has room; one larger than a bin gets one of its own."""
    items, bins = list(order), list[list[int]]()
    # The most room in one of each pair of bins, of each pair of pairs ...: the first bin with room is found by halving.
    leaves = 1 << len(items).bit_length()
    room = [capacity] * (2 * leaves)
    for item in items:
        node = 1 if sizes[item] <= capacity else leaves + len(bins)
        while node < leaves:
            node = 2 * node + (room[2 * node] < sizes[item])
        if node == leaves + len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= sizes[item]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _assign_to_ranks(
    bins: list[list[int]], padded: list[int], dp_size: int, costs: Sequence[float]
) -> tuple[tuple[MicroBatchPlan, ...], ...]:
    """Give bins of similar cost the same k; among them, the costliest to the rank with the least so far."""

    def cost(samples: list[int]) -> float:
        return sum(costs[sample] for sample in samples)

    ordered = sorted((sorted(samples) for samples in bins), key=lambda samples: (-cost(samples), samples))
    ranks: list[list[MicroBatchPlan]] = [[] for _ in range(dp_size)]
    totals = [0.0] * dp_size
    for start in range(0, len(ordered), dp_size):
        least_loaded = sorted(range(dp_size), key=lambda rank: (totals[rank], rank))
        for rank, samples in zip(least_loaded, ordered[start : start + dp_size], strict=True):
            ranks[rank].append(MicroBatchPlan(tuple(samples), tuple(padded[sample] for sample in samples)))
            totals[rank] += cost(samples)
    return tuple(tuple(rank) for rank in ranks)
