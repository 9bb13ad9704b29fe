"""Compare every engine's logprobs with the policy's after a weight sync; on a mismatch, look for the wrong tensor."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from grpo_mp.batching.microbatches import MicroBatchPlan, round_up
from grpo_mp.batching.packing import context_index, gather_responses, pack, slice_context
from grpo_mp.batching.updates import alignment
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Job, all_gather, broadcast
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.rounding import rounding_noise
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.utils.errors import EarlyStopError, EngineError, UserError, one_line
from grpo_mp.utils.phases import WEIGHT_CHECK, Phase
from grpo_mp.utils.types import Sample
from grpo_mp.weight_sync.compare import (
    ANSWER_TOKENS,
    ANSWERS,
    LEAST_LIMIT,
    RECHECK_SETS,
    ROUNDING_FACTOR,
    WRONG_FACTOR,
    CheckReport,
    compare,
    comparison_sequences,
    describe_difference,
    pool_reports,
    trimmed_mean,
    worst_report,
)
from grpo_mp.weight_sync.update import WeightSync

MAX_PROMPTS = 256  # train prompts from which the compared texts are drawn
ANNOUNCED_S = 10.0  # longer measurements are announced to the user
WARNED_FACTOR = 1.5  # growth factor of a reported difference above which tensors are compared again
Sequences = Sequence[tuple[int, ...]]
Logprobs = list[list[float]]
LOGGER = logging.getLogger(__name__)


class EngineDisagreesError(EngineError):
    """An engine's logprobs differ from the policy's because a tensor differs."""


@dataclass
class EngineCheck:
    """Compares every engine's logprobs with the policy's, on texts of the run."""

    settings: Settings
    policy: Policy | None  # None on ranks that only host an engine
    has_experts: bool  # without experts, no token can be routed differently
    job: Job
    weight_sync: WeightSync
    engines: Rollout
    phases: PhaseManager
    prompts: Sequences  # token ids of train prompts
    should_stop: Callable[[], bool] = lambda: False  # a collective over all ranks
    say: Callable[[str], None] = LOGGER.info
    _rounding: float = field(default=0.0, init=False)  # mean effect of rounding on the policy's logprobs
    _warned: float = field(default=0.0, init=False)  # mean difference of the last warning

    def run(self, version: int, answers: Sequence[Sample] = ()) -> CheckReport:
        """Compare all engines with the policy and return the report of the worst engine, with 0 tokens without engines.

        The mean |logprob difference| may reach `sync.check_tolerance`, by default a multiple of the effect of rounding
        on the policy's own logprobs. An engine beyond this limit is restarted if one of its tensors is wrong. If all
        tensors are right, a warning is logged where rounding explains the difference; else EarlyStopError is raised.

        `version`: weight version of the last sync. `answers`: samples of this rank's engine; the check uses those with
        the lowest group ids over all ranks, so it does not depend on which engine generated which group.
        """
        with self.phases.activity(WEIGHT_CHECK, 4 + 2 * RECHECK_SETS):
            first = sorted(answers, key=lambda sample: sample.group_id)[:ANSWERS]
            own = [(sample.group_id, (*sample.prompt_tokens, *sample.tokens)[-ANSWER_TOKENS:]) for sample in first]
            gathered = sorted(answer for of_rank in all_gather(own, self.job.group) for answer in of_rank)
            texts = [tokens for _, tokens in gathered]
            return self._run(version, comparison_sequences(self.prompts, self._longest, 0, texts))

    @property
    def _longest(self) -> int:
        return self.settings.rollout.max_prompt_tokens + self.settings.rollout.max_response_tokens

    def _run(self, version: int, sequences: Sequences) -> CheckReport:
        began_s = time.monotonic()
        reports, expected = self._compare_engines(sequences)
        set_s = time.monotonic() - began_s
        worst = worst_report(reports)
        limit = self._limit(worst, sequences, expected, set_s)
        if not worst.tokens or worst.passes(max(limit, WARNED_FACTOR * self._warned)):
            return replace(worst, limit=limit)
        sets = [reports, *self._compare_more(worst, limit, set_s)]
        if self.should_stop():
            return replace(worst, limit=limit)
        limit = self.settings.sync.check_tolerance or max(LEAST_LIMIT, ROUNDING_FACTOR * self._rounding)
        by_engine = [[report for report in of_engine if report.tokens] for of_engine in zip(*sets, strict=True)]
        beyond = dict[int, CheckReport]()
        for engine, of_engine in enumerate(by_engine):
            if of_engine:
                mean = trimmed_mean(of_engine) if self.has_experts else pool_reports(of_engine).mean
                if not mean <= limit:  # negated, so that NaN fails
                    beyond[engine] = replace(pool_reports(of_engine), mean=mean, limit=limit)
        # Together, since a second sync also repairs engines that are judged later.
        wrong_tensors = self._find_wrong_tensors([*beyond], version) if beyond else {}
        for engine, report in beyond.items():
            self._judge(engine, report, wrong_tensors[engine])
        return replace(worst_report([pool_reports(of_engine) for of_engine in by_engine if of_engine]), limit=limit)

    def _limit(self, worst: CheckReport, sequences: Sequences, expected: Logprobs, set_s: float) -> float:
        """Return the allowed mean difference; measure the rounding effect again only if `worst` exceeds the limit."""
        if self.settings.sync.check_tolerance:
            return self.settings.sync.check_tolerance
        if worst.tokens and not worst.passes(max(LEAST_LIMIT, ROUNDING_FACTOR * self._rounding)):
            if set_s > ANNOUNCED_S:
                self.say(f"weight check: measuring the rounding of {self._precision}, about {set_s:.0f} s")
            self._rounding = self._measure(sequences, expected).mean
        return max(LEAST_LIMIT, ROUNDING_FACTOR * self._rounding)

    def _measure(self, sequences: Sequences, expected: Logprobs) -> CheckReport:
        """Return how far rounding noise moves the policy's logprobs from `expected`."""
        with self.phases.phase(Phase.SYNC, "rounding of the policy's logprobs"):
            return compare(self._policy_logprobs(sequences, noise=True), expected)

    @property
    def _precision(self) -> str:
        in_fp8 = self.weight_sync.resharder.wire.fp8 or self.settings.training.fp8_format
        return "fp8" if in_fp8 or "fp8" in str(self.settings.engine.args.get("kv_cache_dtype")) else self._dtype

    @property
    def _dtype(self) -> str:
        return self.settings.model.dtype

    def _compare_more(self, worst: CheckReport, limit: float, set_s: float) -> list[list[CheckReport]]:
        """Return reports on more sets of texts for MoE models, where near-ties in routing cause large differences."""
        if not self.has_experts:
            return []
        self.say(
            f"weight check: a mean |logprob difference| of {worst.mean:.3g} is beyond {limit:.3g}; comparing "
            f"{RECHECK_SETS - 1} more sets of texts, about {2 * (RECHECK_SETS - 1) * set_s:.0f} s"
        )
        sets, noise = list[list[CheckReport]](), list[CheckReport]()
        for number in range(1, RECHECK_SETS):
            if self.should_stop():
                return sets
            sequences = comparison_sequences(self.prompts, self._longest, number)
            reports, expected = self._compare_engines(sequences)
            sets.append(reports)
            if not self.settings.sync.check_tolerance:
                noise.append(self._measure(sequences, expected))
        if noise:
            self._rounding = pool_reports(noise).mean
        return sets

    def _judge(self, engine: int, report: CheckReport, found: str) -> None:
        """Restart an engine beyond the limit, warn, or raise EarlyStopError, see `run`. `found`: its wrong tensors."""
        host, tolerance = self.engines.host_ranks[engine], self.settings.sync.check_tolerance
        # In float32 rounding may be too small to measure: use at least the rounding that LEAST_LIMIT implies.
        rounding = max(self._rounding, LEAST_LIMIT / ROUNDING_FACTOR)
        allowed = "(sync.check_tolerance)" if tolerance else f"(rounding of {self._precision} makes {rounding:.3g})"
        sentence = (
            f"after the weight sync engine {engine} (rank {host}) disagrees with the policy: mean "
            f"|logprob difference| {report.mean:.3g} over {report.tokens} tokens, largest {report.largest:.3g}, "
            f"allowed mean {report.limit:.3g} {allowed}"
        )
        if found:
            if self.job.rank == host:
                self.engines.lose_engine(EngineDisagreesError(f"{sentence}; {found}"))
        elif tolerance is None and report.mean <= WRONG_FACTOR * rounding:
            self._warned = report.mean
            if self.job.rank == host:
                LOGGER.warning("%s; %s", sentence, self._advice())
        else:
            raise EarlyStopError(
                f"{sentence}; all tensors arrive unchanged: the engine computes another function, as by another rope, "
                "scale or norm, and starting it again would not help: find the layer by `grpo-mp doctor model`"
            )

    def _advice(self) -> str:
        correction = self.settings.algorithm.rollout_correction
        covers = (
            f"algorithm.rollout_correction.kind={correction.kind} covers it"
            if correction.kind != "none"
            else "set algorithm.rollout_correction={kind: truncate, high: 2.0}, which covers it, or model.dtype=float32"
        )
        return (
            f"all tensors arrive unchanged, and rounding explains it: the engine's own, of {self._precision}, is "
            f"coarser than the policy's; {covers}"
        )

    def _checksums(self) -> dict[str, str]:
        """Return the tensor checksums of this rank's engine; empty without an engine or if it cannot compute them."""
        try:
            return self.weight_sync.checksums()
        except UserError as error:
            LOGGER.warning("the engine's weights cannot be compared: %s", one_line(error))
            return {}

    def _compare_engines(self, sequences: Sequences) -> tuple[list[CheckReport], Logprobs]:
        """Return the report of each engine on `sequences`, and the policy's logprobs; both are equal on all ranks."""
        job, engines = self.job, self.engines
        with self.phases.phase(Phase.SYNC, "policy logprobs"):
            expected = self._policy_logprobs(sequences)
        differences = torch.zeros(job.world_size, 3, dtype=torch.float64)
        with self.phases.phase(Phase.CHECK):
            with engines.losing_engine() as client:
                if client:
                    report = compare(engines.call(client.score(sequences)), expected)
                    measured = [report.mean, report.largest, report.tokens]
                    differences[job.rank] = torch.tensor(measured, dtype=torch.float64)
            dist.all_reduce(differences, group=job.group)
        of_engines = [differences[rank].tolist() for rank in engines.host_ranks]
        return [CheckReport(mean, largest, int(tokens)) for mean, largest, tokens in of_engines], expected

    def _policy_logprobs(self, sequences: Sequences, noise: bool = False) -> Logprobs:
        logprobs = Logprobs()
        if self.policy:
            models = self.policy.models() if noise else ()
            with rounding_noise(models, self._precision, self.job.rank):
                logprobs = sequence_logprobs(self.policy, sequences)
        return broadcast(logprobs, self.job.group)

    def _find_wrong_tensors(self, engines: Sequence[int], version: int) -> dict[int, str]:
        """Sync all weights twice and compare the checksums of `engines`; describe the wrong tensors of each."""
        hosts = {engine: self.engines.host_ranks[engine] for engine in engines}
        is_host = self.job.rank in hosts.values()
        named = ", ".join(map(str, engines))
        self.say(f"weight check: beyond the limit: engine {named}; all weights are sent twice to compare them")

        def sync_again() -> dict[str, str]:
            self.weight_sync.update_weights(version)
            return self._checksums() if is_host else {}

        with self.phases.phase(Phase.SYNC, "looking for the wrong tensor"):
            before = self._checksums() if is_host else {}
            again = sync_again()
            if is_host:
                self.weight_sync.overwrite_weights()
            restored = sync_again()
        found = all_gather(describe_difference(before, again, restored), self.job.group)
        return {engine: found[host] for engine, host in hosts.items()}


def sequence_logprobs(policy: Policy, sequences: Sequences) -> Logprobs:
    """Return for each sequence the policy's logprobs at temperature 1 of all tokens but the first."""
    parallel, layout = policy.parallel, policy.parallel.layout
    align = alignment(layout)
    samples = {i: Sample.from_tokens(i, tokens[:1], tokens[1:]) for i, tokens in enumerate(sequences)}
    lengths = tuple(round_up(len(tokens), align) for tokens in sequences)
    unused, padded = [0.0] * len(sequences), round_up(sum(lengths), policy.padding_multiple)
    batch = pack(samples, unused, unused, MicroBatchPlan(tuple(samples), lengths), align, padded)
    local_batch = slice_context(batch, layout.context, parallel.coords.context)
    repeat = layout.pipeline if layout.virtual_pipeline else 1  # the interleaved schedule needs so many micro-batches
    with policy.use_temperature(1.0):
        outputs = policy.logprobs([local_batch] * repeat)
    values = torch.zeros(batch.total_tokens)
    if outputs and parallel.coords.tensor == parallel.coords.data == 0:
        values[context_index(batch.lengths, layout.context, parallel.coords.context)] = outputs[0][0].cpu()
    dist.all_reduce(values, group=parallel.cpu_group)
    return [response.tolist() for response in gather_responses(values, batch)]
