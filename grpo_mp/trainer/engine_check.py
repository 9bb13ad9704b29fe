"""Compare every engine's logprobs with the policy's after a weight sync."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
import torch.distributed as dist

from grpo_mp.algorithms.settings import RolloutCorrectionConfig
from grpo_mp.batching.microbatches import MicroBatchPlan, round_up
from grpo_mp.batching.packing import context_index, gather_responses, pack, slice_context
from grpo_mp.batching.updates import alignment
from grpo_mp.distributed.process_groups import Job, broadcast
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.rounding import rounding_noise
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.utils.phases import WEIGHT_CHECK, Phase
from grpo_mp.utils.types import Sample
from grpo_mp.weight_sync.compare import (
    DECODED_TOKENS,
    LEAST_LIMIT,
    NOT_COMPARED,
    RECHECK_SETS,
    ROUNDING_FACTOR,
    WRONG_FACTOR,
    CheckReport,
    compare,
    comparison_sequences,
    pool_reports,
    trimmed_mean,
    worst_report,
)
from grpo_mp.weight_sync.update import WeightSync

MAX_PROMPTS = 256  # train prompts from which the compared texts are drawn
WARNED_FACTOR = 1.5  # growth factor of a reported difference above which an engine is checked again
Sequences = Sequence[tuple[int, ...]]
Logprobs = list[list[float]]
LOGGER = logging.getLogger(__name__)


@dataclass
class EngineCheck:
    """Compares every engine's logprobs with the policy's on train prompts.

    The first check of a run compares each attention replica of an engine, and its decoding with its prefill.
    """

    policy: Policy | None  # None on ranks that only host an engine
    has_experts: bool  # without experts, no token can be routed differently
    job: Job
    weight_sync: WeightSync
    engines: Rollout
    phases: PhaseManager
    prompts: Sequences  # token ids of train prompts
    longest: int  # tokens of a compared text
    replicas: int  # attention replicas of an engine
    precision: str  # that engines compute in: a dtype, fp8 or int4
    tolerance: float | None  # sync.check_tolerance
    correction: RolloutCorrectionConfig
    _rounding: float = field(default=0.0, init=False)  # mean effect of rounding on the policy's logprobs
    _checked: bool = field(default=False, init=False)  # the first check is done
    _warned: float = field(default=0.0, init=False)  # mean difference of the last warning

    def run(self, version: int) -> CheckReport:
        """Compare all engines with the policy and return the report of the worst engine, with 0 tokens without engines.

        The mean |logprob difference| may reach `sync.check_tolerance`, by default a multiple of the effect of rounding
        on the policy's own logprobs. Beyond this limit all weights are sent again as `version`. If the difference stays
        and rounding may explain it, a warning is logged; else EarlyStopError is raised.
        """
        with self.phases.activity(WEIGHT_CHECK, 4 * RECHECK_SETS):
            reports = self._compare()
            if wrong := self._beyond_limit(reports):
                with self.phases.phase(Phase.SYNC, "second sync"):
                    self.weight_sync.update_weights(version)
                reports = self._compare()
                if wrong_again := self._beyond_limit(reports):
                    self._judge(*wrong_again)
                elif self.job.rank == 0:
                    LOGGER.warning("%s; a second sync repaired it: the first was incomplete", self._describe(*wrong))
        self._checked = True
        return replace(worst_report(reports), limit=self._limit)

    @property
    def _limit(self) -> float:
        return self.tolerance or max(LEAST_LIMIT, ROUNDING_FACTOR * self._rounding)

    def _compare(self) -> list[CheckReport]:
        """Return the report of each engine; measure the effect of rounding if one is beyond the limit.

        Near-ties in routing cause large differences of few tokens: MoE models are then compared on more texts.
        """
        reports, expected = self._compare_set(0)
        if self._all_pass(reports):
            return reports
        noise = self._measure(0, expected)
        self._rounding = noise.mean
        if self._all_pass(reports) or not self.has_experts:
            return reports
        sets = [reports]
        noises = [noise]
        for number in range(1, RECHECK_SETS):
            reports, expected = self._compare_set(number)
            sets.append(reports)
            noises.append(self._measure(number, expected))
        self._rounding = pool_reports(noises).mean
        by_engine = [[report for report in of_engine if report.tokens] for of_engine in zip(*sets, strict=True)]
        return [
            replace(pool_reports(of_engine), mean=trimmed_mean(of_engine)) if of_engine else NOT_COMPARED
            for of_engine in by_engine
        ]

    def _all_pass(self, reports: Sequence[CheckReport]) -> bool:
        return all(report.passes(max(self._limit, WARNED_FACTOR * self._warned)) for report in reports)

    def _beyond_limit(self, reports: Sequence[CheckReport]) -> tuple[int, CheckReport] | None:
        """Return the first engine beyond the limit and its report."""
        return next(((engine, one) for engine, one in enumerate(reports) if not self._all_pass([one])), None)

    def _judge(self, engine: int, report: CheckReport) -> None:
        """Warn of an engine that disagrees after two syncs, or raise EarlyStopError."""
        # In float32 rounding may be too small to measure: use at least the rounding that LEAST_LIMIT implies.
        rounding = max(self._rounding, LEAST_LIMIT / ROUNDING_FACTOR)
        sentence = self._describe(engine, report)
        if self.tolerance or not report.mean <= WRONG_FACTOR * rounding:  # negated, so that NaN fails
            other = "another function, as by another rope, scale or norm: find the layer by `grpo-mp doctor model`"
            if not report.decoding <= self._limit:
                other = (
                    f"logprobs that are {report.decoding:.3g} off in decoding and right in prefill: choose other "
                    "kernels by engine.args (attention_backend, kv_cache_dtype, moe_a2a_backend, disable_cuda_graph)"
                )
            raise EarlyStopError(f"{sentence}; a second sync changes nothing: the engine computes {other}")
        self._warned = report.mean
        remedy = "set algorithm.rollout_correction={kind: truncate, high: 2.0}, which covers it, or model.dtype=float32"
        if self.correction.kind != "none":
            remedy = f"algorithm.rollout_correction.kind={self.correction.kind} covers it"
        if self.job.rank == 0:
            LOGGER.warning("%s; the engine's rounding explains it, coarser than the policy's: %s", sentence, remedy)

    def _describe(self, engine: int, report: CheckReport) -> str:
        rounding = f"rounding of {self.precision} makes {self._rounding:.3g}"
        host = self.engines.host_ranks[engine]
        return (
            f"after the weight sync engine {engine} (rank {host}) disagrees with the policy: mean "
            f"|logprob difference| {report.mean:.3g} over {report.tokens} tokens, largest {report.largest:.3g}, "
            f"allowed mean {self._limit:.3g} ({'sync.check_tolerance' if self.tolerance else rounding})"
        )

    def _compare_set(self, number: int) -> tuple[list[CheckReport], Logprobs]:
        """Return each engine's report on a set of texts, and the policy's logprobs; both are equal on all ranks."""
        job = self.job
        sequences = comparison_sequences(self.prompts, self.longest, number)
        with self.phases.phase(Phase.SYNC, "policy logprobs"):
            expected = self._policy_logprobs(sequences)
        differences = torch.zeros(job.world_size, 4, dtype=torch.float64)
        with self.phases.phase(Phase.CHECK):
            with self.engines.losing_engine() as client:
                if client:
                    report = self.engines.call(self._compare_engine(client, sequences, expected))
                    measured = [report.mean, report.largest, report.tokens, report.decoding]
                    differences[job.rank] = torch.tensor(measured, dtype=torch.float64)
            dist.all_reduce(differences, group=job.group)
        reports = [CheckReport(*differences[rank].tolist()) for rank in self.engines.host_ranks]
        return [replace(report, tokens=int(report.tokens)) for report in reports], expected

    async def _compare_engine(self, client: EngineClient, sequences: Sequences, expected: Logprobs) -> CheckReport:
        """Return the engine's report; in the first check, the worst of each replica's prefill and decoding."""
        if self._checked:
            return compare(await client.score(sequences), expected)

        async def compare_replica(replica: int) -> list[CheckReport]:
            outputs = await client.decode(sequences, DECODED_TOKENS, replica)
            decoded = [(*tokens, *output.tokens) for tokens, output in zip(sequences, outputs, strict=True)]
            scored = list(zip(await client.score(decoded, replica), expected, strict=True))
            prefill = compare([logprobs[: len(known)] for logprobs, known in scored], expected)
            decoding = compare([output.logprobs for output in outputs], [one[len(known) :] for one, known in scored])
            return [prefill, replace(decoding, decoding=decoding.mean)]

        by_replica = await asyncio.gather(*map(compare_replica, range(self.replicas)))
        return max(chain(*by_replica), key=lambda report: (not report.passes(math.inf), report.mean))

    def _measure(self, number: int, expected: Logprobs) -> CheckReport:
        """Return how far rounding noise moves the policy's logprobs on a set of texts from `expected`."""
        if self.tolerance:
            return NOT_COMPARED
        sequences = comparison_sequences(self.prompts, self.longest, number)
        with self.phases.phase(Phase.SYNC, "rounding of the policy's logprobs"):
            return compare(self._policy_logprobs(sequences, noise=True), expected)

    def _policy_logprobs(self, sequences: Sequences, noise: bool = False) -> Logprobs:
        logprobs = Logprobs()
        if self.policy:
            models = self.policy.models() if noise else ()
            with rounding_noise(models, self.precision, self.job.rank):
                logprobs = sequence_logprobs(self.policy, sequences)
        return broadcast(logprobs, self.job.group)


def sequence_logprobs(policy: Policy, sequences: Sequences) -> Logprobs:
    """Return for each sequence the policy's logprobs at temperature 1 of all tokens but the first."""
    parallel = policy.parallel
    layout = policy.parallel.layout
    align = alignment(layout)
    samples = {i: Sample.from_tokens(i, tokens[:1], tokens[1:]) for i, tokens in enumerate(sequences)}
    lengths = tuple(round_up(len(tokens), align) for tokens in sequences)
    unused = [0.0] * len(sequences)
    padded = round_up(sum(lengths), policy.padding_multiple)
    batch = pack(samples, unused, unused, MicroBatchPlan(tuple(samples), lengths), align, padded)
    local_batch = slice_context(batch, layout.context, parallel.coords.context)
    repeat = layout.pipeline if layout.virtual_pipeline else 1  # the interleaved schedule needs so many micro-batches
    with policy.use_head(temperature=1.0):
        outputs = policy.logprobs([local_batch] * repeat)
    values = torch.zeros(batch.total_tokens)
    if outputs and parallel.coords.tensor == parallel.coords.data == 0:
        values[context_index(batch.lengths, layout.context, parallel.coords.context)] = outputs[0][0].cpu()
    dist.all_reduce(values, group=parallel.cpu_group)
    return [response.tolist() for response in gather_responses(values, batch)]
