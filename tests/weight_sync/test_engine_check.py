"""The check of the engines after a sync, with a real policy of one rank and engines that are made up."""

import asyncio
import math
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpo_mp.config import Settings, load_settings
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import single_rank_environment, start_parallel, stop_parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.trainer.engine_check import EngineCheck, sequence_logprobs
from grpo_mp.trainer.phase_manager import PhaseManager
from grpo_mp.trainer.step_logger import sync_metrics
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.weight_sync.compare import NOT_COMPARED, RECHECK_SETS, ROUNDING_FACTOR, CheckReport
from grpo_mp.weight_sync.update import SyncReport, WeightSync
from tests.conftest import TinyRun

PROMPTS = [(5, 6, 7, 8), (9, 10, 11)]


class Engine:
    """An engine of the policy's own logprobs, off by `errors[i]` in the i-th set of sequences.

    `replica_errors`: added in one of its replicas, in prefill and decoding alike; `decode_error`: added in decoding.
    """

    host_ranks = (0,)

    def __init__(
        self,
        policy: Policy,
        errors: Sequence[float],
        replica_errors: Sequence[float] = (0.0,),
        decode_error: float = 0.0,
    ) -> None:
        self._policy = policy
        self._errors = list(errors)
        self.replica_errors = replica_errors
        self._decode_error = decode_error
        self.sets: list[Sequence[Sequence[int]]] = []
        self.synced = 0

    @property
    def client(self) -> "Engine":
        return self

    def losing_engine(self) -> AbstractContextManager["Engine"]:
        return nullcontext(self)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)

    async def decode(self, token_lists: Sequence[Sequence[int]], count: int, replica: int) -> list[EngineOutput]:
        if not replica:
            self.sets.append(token_lists)
        added = (7,) * count
        scored = await self.score([(*tokens, *added) for tokens in token_lists], replica)
        logprobs = [tuple(value + self._decode_error for value in sequence[-count:]) for sequence in scored]
        return [EngineOutput(added, of_one, (3,) * count, truncated=True) for of_one in logprobs]

    async def score(self, token_lists: Sequence[Sequence[int]], replica: int | None = None) -> list[list[float]]:
        if replica is None:
            self.sets.append(token_lists)
        error = self._errors[min(len(self.sets), len(self._errors)) - 1] + self.replica_errors[replica or 0]
        expected = sequence_logprobs(self._policy, [tuple(tokens) for tokens in token_lists])
        return [[value + error for value in sequence] for sequence in expected]

    def update_weights(self, version: int) -> None:
        assert version == 3
        self.synced += 1


@pytest.fixture(scope="module")
def settings(tiny_run: TinyRun) -> Settings:
    return load_settings(tiny_run.config, ["layout={}", "algorithm.kl.coef=0.0"])


@pytest.fixture(scope="module")
def policy(settings: Settings) -> Iterator[Policy]:
    with single_rank_environment():
        yield Policy(settings, start_parallel(LayoutConfig(), 0, 60.0), with_reference=False)
        stop_parallel()


def in_phase(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def make_check(settings: Settings, policy: Policy, engine: Engine, has_experts: bool = True) -> EngineCheck:
    weight_sync = cast(WeightSync, SimpleNamespace(update_weights=engine.update_weights))
    phases = cast(PhaseManager, SimpleNamespace(phase=in_phase, activity=in_phase))
    rollout = cast(Rollout, engine)
    job = policy.parallel.job
    return EngineCheck(
        policy,
        has_experts,
        job,
        weight_sync,
        rollout,
        phases,
        PROMPTS,
        longest=100,
        replicas=len(engine.replica_errors),
        precision="fp8",
        tolerance=settings.sync.check_tolerance,
        correction=settings.algorithm.rollout_correction,
    )


def test_an_engine_with_the_policys_weights_passes_on_real_prompts(settings: Settings, policy: Policy) -> None:
    engine = Engine(policy, [0.0])
    report = make_check(settings, policy, engine).run(3)
    assert report.mean <= report.largest < 1e-6  # longer texts are rounded otherwise
    assert engine.sets == [tuple(PROMPTS)]
    assert (report.tokens, report.limit) == (5, 1e-4)


def test_an_error_in_the_first_set_alone_is_forgiven(settings: Settings, policy: Policy) -> None:
    engine = Engine(policy, [2e-4, 0.0])
    report = make_check(settings, policy, engine).run(3)
    assert 0 < report.mean < 1e-4 < report.largest
    assert len(engine.sets) == RECHECK_SETS
    texts = {prompt[start:] for prompt in PROMPTS for start in range(len(prompt) - 1)}
    assert all(set(sequences) <= texts for sequences in engine.sets)


def test_an_error_in_every_set_names_the_engine(settings: Settings, policy: Policy) -> None:
    engine = Engine(policy, [0.5])
    with pytest.raises(EarlyStopError) as raised:
        make_check(settings, policy, engine).run(3)
    message = str(raised.value)
    assert message.startswith("after the weight sync engine 0 (rank 0) disagrees with the policy: mean |logprob diff")
    assert "largest 0.5, allowed mean 0.0001 (sync.check_tolerance); a second sync changes nothing" in message
    assert engine.synced == 1


def test_each_replica_of_an_engine_is_compared(settings: Settings, policy: Policy) -> None:
    engine = Engine(policy, [0.0], replica_errors=(0.0, 0.0, 0.5, 0.0))
    with pytest.raises(EarlyStopError, match=r"mean \|logprob difference\| 0.5 over .* computes another function"):
        make_check(settings, policy, engine).run(3)


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_decoding_is_compared_with_prefill(settings: Settings, policy: Policy, error: float) -> None:
    """The caches, graphs and kernels of decoding take no part in scoring a text."""
    engine = Engine(policy, [0.0], decode_error=error)
    stops = rf"computes logprobs that are {error:.3g} off in decoding and right in prefill: choose other kernels by eng"
    with pytest.raises(EarlyStopError, match=stops):
        make_check(settings, policy, engine).run(3)


def test_later_checks_only_score(settings: Settings, policy: Policy) -> None:
    """What decoding computes is then in the mismatch metrics of each step."""
    engine = Engine(policy, [0.0])
    check = make_check(settings, policy, engine)
    check.run(3)
    engine.decode = None  # type: ignore[assignment,method-assign]
    assert check.run(3).tokens == 5


def test_a_second_sync_repairs_an_engine(settings: Settings, policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(policy, [0.5] * RECHECK_SETS + [0.0])
    report = make_check(settings, policy, engine).run(3)
    assert report.mean < 1e-6
    assert (engine.synced, len(engine.sets)) == (1, RECHECK_SETS + 1)
    assert "a second sync repaired it" in caplog.text


@pytest.fixture
def measured(settings: Settings) -> Settings:
    """Return settings without a tolerance of their own."""
    return settings.model_copy(update={"sync": settings.sync.model_copy(update={"check_tolerance": None})})


@pytest.mark.parametrize(("share", "outcome"), [(0.9, "passes"), (1.3, "warns"), (1.9, "stops"), (math.nan, "stops")])
def test_an_engine_that_only_rounds_otherwise_is_not_given_up(
    measured: Settings,
    policy: Policy,
    share: float,
    outcome: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is ROUNDING_FACTOR times what noise changes; beyond WRONG_FACTOR the engine computes otherwise."""
    monkeypatch.setattr(EngineCheck, "_measure", lambda *_: CheckReport(0.05, 0.4, 5))
    engine = Engine(policy, [share * ROUNDING_FACTOR * 0.05])
    check = make_check(measured, policy, engine, has_experts=False)
    if outcome == "stops":
        with pytest.raises(EarlyStopError, match="changes nothing: the engine computes another function"):
            check.run(3)
    else:
        report = check.run(3)
        assert report.limit == pytest.approx(0.075)
        assert report.mean == pytest.approx(share * 0.075, abs=1e-6)
    warnings = [text for text in caplog.messages if "algorithm.rollout_correction" in text]
    assert len(warnings) == (outcome == "warns")
    synced = int(outcome != "passes")
    assert (engine.synced, len(engine.sets)) == (synced, 1 + synced)  # without experts there are no ties
    if outcome == "warns":
        assert f"{share * 0.075:.3g} over 5 tokens" in warnings[0]
        check.run(3)
        assert engine.synced == 1  # it is said once, not at every step


def test_the_limit_is_measured_where_the_difference_is_beyond_the_least(
    measured: Settings, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = list[float]()
    measure = EngineCheck._measure

    def count(*arguments: Any) -> CheckReport:
        report = measure(*arguments)
        noise.append(report.mean)
        return report

    monkeypatch.setattr(EngineCheck, "_measure", count)
    engine = Engine(policy, [1e-5, 2e-4, 2e-4])
    check = make_check(measured, policy, engine, has_experts=False)
    assert check.run(3).limit == 1e-4
    assert not noise
    limit = check.run(3).limit
    assert limit == ROUNDING_FACTOR * noise[0] > 2e-4  # noise of 2^-4 at every linear layer
    assert check.run(3).limit == limit
    assert len(noise) == 1  # later it serves as long as the difference is below


def test_engines_that_are_lost_do_not_count(
    settings: Settings, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any the check says nothing, least of all that there is no difference."""
    engine = Engine(policy, [0.0])
    check = make_check(settings, policy, engine)
    monkeypatch.setattr(Engine, "losing_engine", lambda _: nullcontext(None))
    nothing = check.run(3)
    assert (nothing.tokens, engine.sets) == (0, [])
    sync = SyncReport(3, 0, 0, 0, 1, 1.0)
    assert "sync/check/logprob_abs_diff/mean" not in sync_metrics([sync], nothing)
    assert sync_metrics([sync], CheckReport(0.5, 0.6, 7))["sync/check/logprob_abs_diff/max"] == 0.6
    assert sync_metrics([sync], nothing)["sync/check/tokens"] == 0

    monkeypatch.setattr(Engine, "host_ranks", (0, 1))
    right = CheckReport(1e-7, 1e-6, 100)
    monkeypatch.setattr(EngineCheck, "_compare_set", lambda *_: ([NOT_COMPARED, right], []))
    monkeypatch.setattr(EngineCheck, "_measure", lambda *_: CheckReport(1e-6, 1e-6, 100))
    assert check.run(3) == replace(right, limit=1e-4)
