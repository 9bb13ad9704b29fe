"""Check after a weight sync that every engine computes the policy's logprobs; where not, find the wrong tensor."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from grpo_mp.batching.microbatches import MicroBatchPlan, round_up
from grpo_mp.batching.packing import context_index, gather_responses, pack, slice_context
from grpo_mp.batching.updates import alignment
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Job, all_gather, broadcast
from grpo_mp.errors import EngineError, UserError, one_line
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
    describe_repair,
    pool_reports,
    trimmed_mean,
    worst_report,
)
from grpo_mp.weight_sync.update import WeightSync

PROMPTS = 4  # of the train data, scored beside the random sequences
Sequences = Sequence[tuple[int, ...]]
LOGGER = logging.getLogger(__name__)


class EngineDisagreesError(EngineError):
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

        Engines that are lost, also meanwhile, do not count: without any other the report is of no tokens. An engine is
        given up when its mean is beyond the tolerance on the fixed tokens, and is so again on those and many more
        without the few farthest: tokens at a routing tie do not decide (see compare.py). Raises EngineDisagreesError,
        on its rank, where it may not be given up.
        """
        in_fp8 = self.weight_sync.resharder.wire.fp8 or self.settings.training.fp8_format
        dtype = "fp8" if in_fp8 else self.settings.model.dtype
        tolerance = self.settings.sync.check_tolerance or TOLERANCE[dtype]
        reports = self._compare_engines(0)
        if worst_report(reports).passes(tolerance):
            return worst_report(reports)
        more = [self._compare_engines(number) for number in range(1, RECHECK_SETS)]
        by_engine = list(zip(reports, *more, strict=True))
        for engine, sets in enumerate(by_engine):
            report = pool_reports([one for one in sets if one.tokens])
            if not report.tokens:
                continue
            mean = trimmed_mean([one for one in sets if one.tokens])
            if not mean <= tolerance:  # so that what is no number does not pass
                host = self.engines.host_ranks[engine]
                error = EngineDisagreesError(
                    f"after the weight sync engine {engine} (rank {host}) disagrees with the policy: mean "
                    f"|logprob difference| {mean:.3g} over {report.tokens} tokens without the "
                    f"{MAX_ROUTING_TIES} farthest, largest {report.largest:.3g}, allowed mean {tolerance:g} "
                    f"(sync.check_tolerance); {self._find_wrong_tensor(host, version)}"
                )
                if self.job.rank == host:
                    self.engines.lose_engine(error)
        return worst_report([pool_reports(sets) for sets in by_engine])

    def check_unchanged(self, step: int, version: int) -> None:
        """Check by checksum, every `sync.check_delta_every` steps, the weights that the last sync left out.

        They are sent after all, which changes no tensor of an engine that has them; one that it changes is right
        then, and is named in a warning. Every rank must call this, after the sync as `version`.
        """
        every = self.settings.sync.check_delta_every
        if not every or step % every or not self.weight_sync.unchanged:
            return
        with self.phases.phase(Phase.SYNC, "check of unchanged weights"):
            before = self._checksums()
            self.weight_sync.send_unchanged(version)
            again = self._checksums()
        if before and again and (repair := describe_repair(before, again)):
            LOGGER.warning(
                "engine %d: %s, though they had been sent before: they are now; what it generated in the %d steps "
                "up to step %d (sync.check_delta_every) may be of wrong weights",
                self.engines.host_ranks.index(self.job.rank),
                repair,
                every,
                step,
            )

    def _checksums(self) -> dict[str, str]:
        """Return the checksums of this rank's engine; nothing where it has none, or does not compute them.

        SGLang needs memory for it: that of FP8 weights in float32, some tensors at a time. One that is lost is found so
        by what it is sent next.
        """
        try:
            return self.weight_sync.checksums()
        except UserError as error:
            LOGGER.warning("weights that a sync leaves out are sent, and not compared: %s", one_line(error))
            return {}

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
        differences = torch.zeros(job.world_size, 3, dtype=torch.float64)
        with self.phases.phase(Phase.CHECK):
            with engines.losing_engine() as client:
                if client:
                    report = compare(engines.call(client.score(sequences)), expected)
                    measured = [report.mean, report.largest, report.tokens]
                    differences[job.rank] = torch.tensor(measured, dtype=torch.float64)
            dist.all_reduce(differences, group=job.group)
        of_engines = [differences[rank].tolist() for rank in engines.host_ranks]
        return [CheckReport(mean, largest, int(tokens)) for mean, largest, tokens in of_engines]

    def _find_wrong_tensor(self, host: int, version: int) -> str:
        """Push again and look which tensors of the engine of rank `host` change.

        The others are sent what they have: they may be generating. Every rank must call this; all get the answer.
        """

        def sync_again() -> dict[str, str]:
            self.weight_sync.update_weights(version, all_weights=True)
            return self._checksums() if self.job.rank == host else {}

        with self.phases.phase(Phase.SYNC, "looking for the wrong tensor"):
            before = self._checksums() if self.job.rank == host else {}
            again = sync_again()
            if self.job.rank == host:
                self.weight_sync.overwrite_weights()
            restored = sync_again()
        return all_gather(describe_difference(before, again, restored), self.job.group)[host]


def sequence_logprobs(policy: Policy, sequences: Sequences) -> list[list[float]]:
    """Compute the policy's logprob at temperature 1 of every token after the first of each sequence.

    Works in any layout. Every rank must call this, and all get the logprobs.
    """
    parallel, layout = policy.parallel, policy.parallel.layout
    align = alignment(layout)
    samples = {i: Sample.from_tokens(i, tokens[:1], tokens[1:]) for i, tokens in enumerate(sequences)}
    lengths = tuple(round_up(len(tokens), align) for tokens in sequences)
    unused, padded = [0.0] * len(sequences), round_up(sum(lengths), policy.padding_multiple)
    batch = pack(samples, unused, unused, MicroBatchPlan(tuple(samples), lengths), align, padded)
    local_batch = slice_context(batch, layout.context, parallel.coords.context)
    repeat = layout.pipeline if layout.virtual_pipeline else 1  # an interleaved schedule needs that many
    with policy.use_temperature(1.0):
        outputs = policy.logprobs([local_batch] * repeat)
    values = torch.zeros(batch.total_tokens)
    if outputs and parallel.coords.tensor == parallel.coords.data == 0:
        values[context_index(batch.lengths, layout.context, parallel.coords.context)] = outputs[0][0].cpu()
    dist.all_reduce(values, group=parallel.cpu_group)
    return [response.tolist() for response in gather_responses(values, batch)]
