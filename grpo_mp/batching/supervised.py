"""One update of supervised fine-tuning: every rank makes the same plan from lengths, and reads only its own samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_mp.batching.updates import UpdatePlan, microbatches, plan_updates
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.utils.types import MicroBatch, Sample


@dataclass(frozen=True)
class SupervisedBatch:
    """The plan of an update, and this rank's micro-batches. `lengths`, `learned`: tokens of each of its samples."""

    plan: UpdatePlan
    microbatches: tuple[MicroBatch, ...]
    lengths: tuple[int, ...]
    learned: tuple[int, ...]

    @property
    def padded_tokens(self) -> int:
        """Return the tokens that the job computes, padding included."""
        return sum(plan.tokens for rank in self.plan.schedule.ranks for plan in rank if plan.samples)


def supervised_batch(
    lengths: Sequence[int],
    learned: Sequence[int],
    read: Callable[[int], Sample],
    parallel: Parallel,
    max_tokens: int,
    hidden_size: int,
    with_mtp: bool = False,
    pad_multiple: int = 1,
) -> SupervisedBatch:
    """Plan one update over all samples, and pack what this rank computes of it.

    `lengths`: of the samples; `learned`: their tokens that have a loss, whose mean the loss is; `read`: a sample by its
    place in them; `max_tokens`: of a micro-batch; `with_mtp`: a multi-token-prediction layer learns, too.
    """
    (plan,) = plan_updates(
        lengths,
        1,
        layout=parallel.layout,
        dp_size=parallel.dp_size,
        max_tokens=max_tokens,
        hidden_size=hidden_size,
        pad_multiple=pad_multiple,
    )
    data_rank, context_rank = parallel.coords.data, parallel.coords.context
    samples = {place: read(place) for place in plan.samples_of(data_rank)}
    weights = [1.0 / max(1, sum(learned))] * len(lengths)
    zeros, layout = [0.0] * len(lengths), parallel.layout
    batches = microbatches(
        plan,
        samples,
        advantages=zeros,
        loss_weights=weights,
        layout=layout,
        data_rank=data_rank,
        context_rank=context_rank,
        with_mtp=with_mtp,
    )
    return SupervisedBatch(plan, tuple(batches), tuple(lengths), tuple(learned))
