"""Dynamic micro-batches: sequences are balanced over data-parallel ranks.

Pipeline schedules and expert parallelism need the same number K of micro-batches on every rank and synchronize the
ranks in each. The plan therefore makes `dp_size * K` bins of similar cost and runs the most similar ones together.

"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


def compute_cost(length: int, hidden_size: int, prefix: int = 0) -> float:
    """Return the time of `length` tokens that also attend to `prefix` preceding tokens, in arbitrary units.

    Attention of a dense transformer grows with the square of the length, by about 1 / (12 * hidden_size).
    """
    return length + length * (2 * prefix + length) / (12 * hidden_size)


@dataclass(frozen=True)
class SharedPrompt:
    """A prompt of `tokens` tokens, padded to `length`, that the next `samples` samples of a micro-batch share."""

    samples: int
    tokens: int
    length: int


@dataclass(frozen=True)
class MicroBatchPlan:
    """Samples that are packed together. An empty micro-batch is run as a dummy sequence."""

    samples: tuple[int, ...] = ()  # indices into the planned lengths
    lengths: tuple[int, ...] = ()  # padded length of each sample [tokens], without its shared prompt
    prompts: tuple[SharedPrompt, ...] = ()  # covers all samples, in order; (): prompts are not shared
    pad_to: int = 0  # least size of the micro-batch [tokens]

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + sum(prompt.length for prompt in self.prompts)


@dataclass(frozen=True)
class MicroBatchSchedule:
    """`ranks[r][k]` is micro-batch k of data-parallel rank r; all ranks have the same number of micro-batches."""

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]
    align: int  # every padded length is a multiple of `align`

    @property
    def microbatches(self) -> int:
        """Return the number of micro-batches per rank."""
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
    """Assign every sample to a micro-batch of a rank; equal input gives an equal plan.

    `lengths`: tokens of prompt and response. `max_tokens`: largest size of a micro-batch in padded tokens; a longer
    sequence gets its own micro-batch. The number of micro-batches per rank is the smallest multiple of `multiple` that
    packing allows. `costs`: cost of each sample, balanced over bins (default: its tokens).
    """
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
    """Return the smallest multiple of `multiple` that is at least `tokens`."""
    return -(-tokens // multiple) * multiple


def _least_loaded(
    order: list[int], padded: list[int], bins: int, max_tokens: int, costs: Sequence[float]
) -> list[list[int]] | None:
    """Put each sample, longest first, into the cheapest bin with room; return None if a sample fits in no bin."""
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
    """Put each item, in order, into the first bin with room. An item larger than `capacity` gets its own bin."""
    items = list(order)
    bins = list[list[int]]()
    # Segment tree over the bins: each node holds the largest free room below it, so the search takes O(log n).
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
    """Give bins of similar cost the same micro-batch index k.

    Among these, the costliest bin goes to the rank with the smallest total so far.
    """

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
