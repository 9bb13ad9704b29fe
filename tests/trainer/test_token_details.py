"""What is kept of single tokens, against tables of values by token: each token of a step has an id of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from grpo_mp.batching.packing import pack
from grpo_mp.batching.shared_prompts import SamplePrompt
from grpo_mp.batching.step_batch import StepBatch
from grpo_mp.batching.updates import PackingRule, plan_updates
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.trainer import token_details
from grpo_mp.trainer.token_details import (
    TOKENS,
    TokenDetails,
    best_and_worst,
    eval_records,
    gather_details,
    longest,
    most_mismatched,
    sample_records,
)
from grpo_mp.utils.types import MicroBatch, Prompt, Sample, SampleGroup, SampleInfo
from tests.one_rank import one_rank_job

RANDOM = Random(0)
IDS = 400
ENGINE, POLICY, ADVANTAGE = ([round(RANDOM.uniform(-3, 0), 3) for _ in range(IDS)] for _ in range(3))
WORST = (2, 1)  # the sample of the most mismatched token, in its middle
Updates = Sequence[Sequence[MicroBatch]]


def make_groups() -> list[SampleGroup]:
    """Three groups of two samples, prompts of 2 to 4 tokens; one sample has tokens that it was given."""
    groups, unused = [], iter(range(10, IDS))
    for number in range(3):
        prompt = tuple(range(1, number + 3))
        samples = []
        for index in range(2):
            tokens = tuple(next(unused) for _ in range(4 + 3 * number + index))
            given = tuple(place not in (1, 2) for place in range(len(tokens))) if (number, index) == (1, 0) else ()
            logprobs = tuple(ENGINE[token] for token in tokens)
            sample = Sample(number, index, prompt, tokens, logprobs, (0,) * len(tokens), False, generated=given)
            samples.append(replace(sample, reward=number + index / 2))
        groups.append(SampleGroup(Prompt(number, "", prompt), tuple(samples)))
    return groups


GROUPS = make_groups()
SAMPLES = [sample for group in GROUPS for sample in group.samples]
INFOS = tuple(
    SampleInfo(one.group_id, one.index, len(one.prompt_tokens), len(one.tokens), one.reward, False, 0)
    for one in SAMPLES
)
LARGEST = SAMPLES[2 * WORST[0] + WORST[1]].tokens[5]
POLICY[LARGEST] = ENGINE[LARGEST] - 9.0


def make_step(shared: bool, with_policy: bool = True) -> tuple[Updates, StepBatch]:
    """Pack the samples, shuffled, into the micro-batches of two updates."""
    prompts = [SamplePrompt(one.group_id, len(one.prompt_tokens)) for one in SAMPLES] if shared else []
    order = [4, 0, 5, 2, 1, 3]
    lengths = [one.total_tokens for one in SAMPLES]
    plan = plan_updates(lengths, 2, PackingRule(LayoutConfig(), 1, 48, 8), order=order, prompts=prompts)
    advantages = [torch.tensor([ADVANTAGE[token] for token in one.tokens], dtype=torch.float64) for one in SAMPLES]
    updates = []
    for update in plan:
        own, values = ([some[i] for i in update.samples] for some in (SAMPLES, advantages))
        schedule = update.schedule
        mbs = [pack(own, values, [1.0] * len(own), one, schedule.align) for one in schedule.ranks[0]]
        policy = torch.tensor(POLICY)
        updates.append([replace(mb, old_logprobs=policy[mb.targets] if with_policy else None) for mb in mbs])
    return updates, StepBatch(INFOS, (), (), plan, ())


def expected(sample: Sample, with_policy: bool = True) -> dict[int, Any]:
    mask = sample.generated or (True,) * len(sample.tokens)
    return {
        place: pytest.approx((ENGINE[token], POLICY[token] if with_policy else None, ADVANTAGE[token]))
        for place, token in enumerate(sample.tokens)
        if mask[place]
    }


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    with one_rank_job() as parallel:
        yield parallel


@pytest.mark.parametrize("shared", [False, True])
def test_every_generated_token_has_its_values(parallel: Parallel, shared: bool) -> None:
    updates, batch = make_step(shared)
    found = gather_details(updates, batch, {one.key for one in SAMPLES}, parallel)
    assert {key: dict(details.values) for key, details in found.items()} == {one.key: expected(one) for one in SAMPLES}


def test_only_wanted_samples_are_gathered_and_without_old_logprobs_the_policy_is_unknown(parallel: Parallel) -> None:
    updates, batch = make_step(shared=False, with_policy=False)
    found = gather_details(updates, batch, {WORST, (9, 9)}, parallel)
    assert {key: dict(one.values) for key, one in found.items()} == {WORST: expected(SAMPLES[5], with_policy=False)}
    assert most_mismatched(updates, batch, parallel) is None


@pytest.mark.parametrize("shared", [False, True])
def test_the_most_mismatched_token_names_its_sample(parallel: Parallel, shared: bool) -> None:
    assert most_mismatched(*make_step(shared), parallel) == WORST


def test_what_is_masked_mismatches_nothing(parallel: Parallel) -> None:
    """Prompts and given tokens have no logprob of the engine; one that is not finite is no mismatch."""
    updates, batch = make_step(shared=False)
    for mb in (mb for update in updates for mb in update):
        assert mb.old_logprobs is not None
        mb.old_logprobs[mb.mask == 0] = -50.0
        mb.rollout_logprobs[mb.targets == SAMPLES[0].tokens[0]] = float("nan")
    assert most_mismatched(updates, batch, parallel) == WORST


def test_other_ranks_hold_other_samples_and_other_tokens(parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context ranks have parts of a sequence, data ranks other sequences: this rank has one of the other's tokens."""
    updates, batch = make_step(shared=False)
    other: dict[str, Any] = {"details": {WORST: {99: (-1.0, -2.0, 0.5)}, (7, 7): {0: (-1.0, None, 0.0)}}}
    monkeypatch.setattr(token_details, "all_gather", lambda own, group: [own, other["details"]])
    found = gather_details(updates, batch, {WORST}, parallel)
    assert dict(found[WORST].values) == expected(SAMPLES[5]) | {99: (-1.0, -2.0, 0.5)}
    assert dict(found[7, 7].values) == {0: (-1.0, None, 0.0)}
    for theirs, largest in ((None, WORST), ((3.0, (7, 7)), WORST), ((30.0, (7, 7)), (7, 7))):
        monkeypatch.setattr(token_details, "all_gather", lambda own, group, theirs=theirs: [own, theirs])
        assert most_mismatched(updates, batch, parallel) == largest


@pytest.mark.parametrize(("worst", "first"), [(5, 0), (600, 600 - TOKENS // 2), (998, 1000 - TOKENS)])
def test_of_a_long_answer_the_tokens_around_the_largest_mismatch_are_kept(worst: int, first: int) -> None:
    values = {place: (-1.0, -4.0 if place == worst else -1.1, 0.123456) for place in range(1000)}
    record = TokenDetails(values).record(range(1000), lambda ids: f"<{ids[0]}>")
    assert record["first"] == first
    assert record["pieces"] == [f"<{place}>" for place in range(first, first + TOKENS)]
    assert record["policy"].index(-4.0) == worst - first
    assert {*record["advantages"]} == {0.1235}


def test_without_the_policy_the_first_tokens_are_kept() -> None:
    record = TokenDetails(dict.fromkeys(range(1000), (-1.0, None, 0.0))).record(range(1000), str)
    assert (record["first"], len(record["pieces"]), record["policy"]) == (0, TOKENS, None)


def test_records_are_of_the_samples_that_are_shown() -> None:
    details = {WORST: TokenDetails({0: (-1.0, -2.0, 0.5)}), (7, 7): TokenDetails({0: (-1.0, -2.0, 0.5)})}
    records = sample_records(GROUPS, details, lambda ids: f"<{ids[0]}>")
    assert {key: record["pieces"] for key, record in records.items()} == {WORST: [f"<{SAMPLES[5].tokens[0]}>"]}


def test_of_what_is_not_trained_on_the_engine_alone_is_kept() -> None:
    """One with tokens that it was given, which are nobody's; advantages are not known."""
    records = sample_records(GROUPS, {}, lambda ids: f"<{ids[0]}>", {(1, 0), (7, 7)})
    (record,) = records.values()
    given = SAMPLES[2].generated
    assert not all(given)
    own = [token for token, is_own in zip(SAMPLES[2].tokens, given, strict=True) if is_own]
    assert record["pieces"] == [f"<{token}>" for token in own]
    assert record["engine"] == [ENGINE[token] for token in own]
    assert (record["policy"], record["advantages"]) == (None, None)


def test_of_an_evaluation_the_first_answer_to_each_question_is_kept() -> None:
    records = eval_records(GROUPS, lambda ids: f"<{ids[0]}>")
    assert list(records) == [(0, 0), (1, 0), (2, 0)]
    assert records[2, 0]["engine"] == [ENGINE[token] for token in SAMPLES[4].tokens]


def test_the_longest_of_the_shown_groups() -> None:
    assert longest(INFOS, {0, 1}) == {(1, 1)}
    assert longest(INFOS, set()) == set()


def test_best_and_worst_of_each_shown_group() -> None:
    more = (*INFOS, replace(INFOS[0], index=2, reward=0.25))
    assert best_and_worst(more, {0, 2}) == {(0, 0), (0, 1), (2, 0), (2, 1)}
