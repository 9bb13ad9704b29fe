"""Check after a weight sync that every engine computes the policy's logprobs; where not, find the wrong tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_mp.batching.microbatches import MicroBatchPlan, round_up
from grpo_mp.batching.packing import context_index, gather_responses, pack, slice_context
from grpo_mp.batching.updates import alignment
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Job, all_gather, broadcast
from grpo_mp.errors import UserError
from grpo_mp.phases import Phase
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.scheduler.phase_manager import PhaseManager
from grpo_mp.types import Sample
from grpo_mp.weight_sync.compare import (
    MAX_ROUTING_TIES,
    RECHECK_SETS,
    TOLERANCE,
    CheckReport,
    compare,
    comparison_sequences,
    describe_difference,
    pool_reports,
    trimmed_mean,
    worst_report,
)
from grpo_mp.weight_sync.update import WeightSync

PROMPTS = 4  # of the train data, scored beside the random sequences
Sequences = Sequence[tuple[int, ...]]


class EngineDisagreesError(UserError):
    """An engine's logprobs are not the policy's."""


@dataclass(frozen=True)
class EngineCheck:
    """Compares every engine's logprobs with the policy's."""

    settings: Settings
    policy: Policy | None  # None on a rank that does not train
    vocab_size: int
    job: Job
    weight_sync: WeightSync
    engines: Rollout
    phases: PhaseManager
    prompts: Sequences  # real prompts, scored beside the random sequences

    def run(self, version: int) -> CheckReport:
        """Return the worst engine's distance from the policy, just synced as `version`. Every rank must call this.

        Raises EngineDisagreesError on every rank when the mean of an engine is beyond the tolerance on the fixed
        tokens, and is so again on those and many more without the few farthest: tokens at a routing tie do not decide
        (see compare.py).
        """
        dtype = "fp8" if self.weight_sync.resharder.wire.fp8 else self.settings.model.dtype
        tolerance = self.settings.sync.check_tolerance or TOLERANCE[dtype]
        reports = self._compare_engines(0)
        if worst_report(reports).passes(tolerance):
            return worst_report(reports)
        more = [self._compare_engines(number) for number in range(1, RECHECK_SETS)]
        by_engine = list(zip(reports, *more, strict=True))
        for engine, sets in enumerate(by_engine):
            report, mean = pool_reports(sets), trimmed_mean(sets)
            if not mean <= tolerance:  # so that what is no number does not pass
                raise EngineDisagreesError(
                    f"after the weight sync engine {engine} (rank {self.engines.host_ranks[engine]}) disagrees with "
                    f"the "
                    f"policy: mean |logprob difference| {mean:.3g} over {report.tokens} tokens without the "
                    f"{MAX_ROUTING_TIES} farthest, largest {report.largest:.3g}, allowed mean {tolerance:g} "
                    f"(sync.check_tolerance); {self._find_wrong_tensor(version)}"
                )
        return worst_report([pool_reports(sets) for sets in by_engine])

    def _compare_engines(self, number: int) -> list[CheckReport]:
        """Return every engine's report on one set of sequences, the same on every rank; set 0 holds real prompts."""
        job, engines, rollout = self.job, self.engines, self.settings.rollout
        sequences = comparison_sequences(
            self.vocab_size,
            rollout.max_prompt_tokens + rollout.max_response_tokens,
            self.settings.run.seed + number,
            () if number else self.prompts[:PROMPTS],
        )
        with self.phases.phase(Phase.SYNC, "policy logprobs"):
            expected = sequence_logprobs(self.policy, sequences) if self.policy else []
            expected = broadcast(expected, job.group)
        differences = torch.zeros(job.world_size, 2, dtype=torch.float64)
        with self.phases.phase(Phase.CHECK):
            with engines.losing_engine() as client:
                if client:
                    report = compare(engines.call(client.score(sequences)), expected)
                    differences[job.rank] = torch.tensor([report.mean, report.largest], dtype=torch.float64)
            dist.all_reduce(differences, group=job.group)
        tokens = sum(map(len, expected))
        return [
            CheckReport(float(differences[rank, 0]), float(differences[rank, 1]), tokens) for rank in engines.host_ranks
        ]

    def _find_wrong_tensor(self, version: int) -> str:
        """Push again and look which of an engine's tensors change. Every rank must call this; all get the answer."""
        engines = self.engines

        def checksums() -> dict[str, str]:
            return engines.call(engines.client.checksums()) if engines.client else {}

        def sync_again() -> dict[str, str]:
            self.weight_sync.update_weights(version, all_weights=True)
            return checksums()

        with self.phases.phase(Phase.SYNC, "looking for the wrong tensor"):
            before = checksums()
            again = sync_again()
            if engines.client:
                engines.call(engines.client.overwrite_weights())
            restored = sync_again()
        answer = describe_difference(before, again, restored) if engines.client else ""
        answers = all_gather(answer, self.job.group)
        return "; ".join(f"engine {engine}: {answers[rank]}" for engine, rank in enumerate(engines.host_ranks))


def sequence_logprobs(policy: Policy, sequences: Sequences) -> list[list[float]]:
    """Compute the policy's logprob at temperature 1 of every token after the first of each sequence.

    Works in any layout. Every rank must call this, and all get the logprobs.
    """
    parallel, layout = policy.parallel, policy.parallel.layout
    align = alignment(layout)
    samples = {i: Sample.from_tokens(i, tokens[:1], tokens[1:]) for i, tokens in enumerate(sequences)}
    lengths = tuple(round_up(len(tokens), align) for tokens in sequences)
    unused = [0.0] * len(sequences)
    batch = pack(samples, unused, unused, MicroBatchPlan(tuple(samples), lengths), align)
    local_batch = slice_context(batch, layout.context, parallel.coords.context)
    repeat = layout.pipeline if layout.virtual_pipeline else 1  # an interleaved schedule needs that many
    with policy.use_temperature(1.0):
        outputs = policy.logprobs([local_batch] * repeat)
    values = torch.zeros(batch.total_tokens)
    if outputs and parallel.coords.tensor == parallel.coords.data == 0:
        values[context_index(batch.lengths, layout.context, parallel.coords.context)] = outputs[0][0].cpu()
    dist.all_reduce(values, group=parallel.cpu_group)
    return [response.tolist() for response in gather_responses(values, batch)]
