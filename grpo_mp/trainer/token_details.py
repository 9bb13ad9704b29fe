"""What engine and policy say of single tokens of a step's answers, for a few that people read."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_mp.batching.step_batch import StepBatch
from grpo_mp.distributed.process_groups import Parallel, all_gather
from grpo_mp.utils.types import MicroBatch, Sample, SampleGroup, SampleInfo

TOKENS = 240  # of an answer that are kept: those around the largest mismatch, else the first
Key = tuple[int, ...]  # of a sample: SampleInfo.key
Values = tuple[float, float | None, float | None]  # of a token: engine's logprob, policy's, advantage


@dataclass(frozen=True)
class TokenDetails:
    """Values of generated tokens of an answer, by index in its response."""

    values: Mapping[int, Values]

    def record(self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return what a sample's file keeps of it: pieces of text with their values, of TOKENS tokens."""
        places = sorted(self.values)
        worst = max(places, key=lambda place: _mismatch(self.values[place]))
        start = max(0, min(places.index(worst) - TOKENS // 2, len(places) - TOKENS))
        shown = places[start : start + TOKENS]
        engine, policy, advantages = zip(*(self.values[place] for place in shown), strict=True)
        return {
            "first": shown[0],
            "pieces": [decode([tokens[place]]) for place in shown],
            "engine": [round(value, 5) for value in engine],
            "policy": None if policy[0] is None else [round(value, 5) for value in policy],
            "advantages": None if advantages[0] is None else [round(value, 4) for value in advantages],
        }

    @classmethod
    def of_engine(cls, sample: Sample) -> "TokenDetails":
        """Return what the engine alone says: of an answer that is not trained on."""
        generated = sample.generated or (True,) * len(sample.tokens)
        logprobs = enumerate(zip(sample.rollout_logprobs, generated, strict=True))
        return cls({place: (logprob, None, None) for place, (logprob, is_own) in logprobs if is_own})


def _mismatch(values: Values) -> float:
    engine, policy, _ = values
    return 0.0 if policy is None else abs(policy - engine)


def most_mismatched(updates: Sequence[Sequence[MicroBatch]], batch: StepBatch, parallel: Parallel) -> Key | None:
    """Return the sample with the token that engine and policy see most differently; None where that is not known.

    Every rank must call this. Only the first update's logprobs are of the weights that sampled.
    """
    largest: tuple[float, Key] | None = None
    for mb, keys in _own(updates, batch, parallel):
        if mb.old_logprobs is not None and mb.mask.any():
            difference = (mb.old_logprobs - mb.rollout_logprobs).abs().nan_to_num() * mb.mask
            place = int(difference.argmax())
            found = float(difference[place]), keys[int(mb.sequence_index[place])]
            largest = found if largest is None else max(largest, found)
    known = [one for one in all_gather(largest, parallel.cpu_group) if one is not None]
    return max(known)[1] if known else None


def gather_details(
    updates: Sequence[Sequence[MicroBatch]], batch: StepBatch, wanted: Collection[Key], parallel: Parallel
) -> dict[Key, TokenDetails]:
    """Gather the values of some samples' tokens, the same on every rank. Every rank must call this."""
    own: dict[Key, dict[int, Values]] = {}
    prompt_tokens = {info.key: info.prompt_tokens for info in batch.infos}
    for mb, keys in _own(updates, batch, parallel):
        for number, key in enumerate(keys):
            if key in wanted:
                rows = ((mb.sequence_index == number) & mb.mask.bool()).nonzero().flatten()
                places = (mb.positions[rows] + 1 - prompt_tokens[key]).tolist()
                policy = [None] * len(places) if mb.old_logprobs is None else mb.old_logprobs[rows].tolist()
                columns = zip(mb.rollout_logprobs[rows].tolist(), policy, mb.advantages[rows].tolist(), strict=True)
                own.setdefault(key, {}).update(zip(places, columns, strict=True))
    merged: dict[Key, dict[int, Values]] = {}
    for part in all_gather(own, parallel.cpu_group):
        for key, values in part.items():
            merged.setdefault(key, {}).update(values)
    return {key: TokenDetails(values) for key, values in merged.items() if values}


def _own(
    updates: Sequence[Sequence[MicroBatch]], batch: StepBatch, parallel: Parallel
) -> Iterator[tuple[MicroBatch, list[Key]]]:
    """Yield the micro-batches whose tokens count on this rank, with the samples of their sequences."""
    if parallel.is_reporting_rank:
        for update, plan in zip(updates, batch.plan, strict=True):
            for mb in update:
                yield mb, [batch.infos[plan.samples[i]].key for i in mb.sample_ids]


def best_and_worst(infos: Iterable[SampleInfo], group_ids: Collection[int]) -> set[Key]:
    """Return the samples of the highest and the lowest reward of each of these groups."""
    groups: dict[int, list[SampleInfo]] = {}
    for info in infos:
        if info.group_id in group_ids:
            groups.setdefault(info.group_id, []).append(info)
    return {pick(group, key=lambda info: info.reward).key for group in groups.values() for pick in (min, max)}


def longest(infos: Iterable[SampleInfo], group_ids: Collection[int]) -> set[Key]:
    """Return the longest sample of these groups."""
    inside = [info for info in infos if info.group_id in group_ids]
    return {max(inside, key=lambda info: info.response_tokens).key} if inside else set()


def sample_records(
    groups: Iterable[SampleGroup],
    details: Mapping[Key, TokenDetails],
    decode: Callable[[Sequence[int]], str],
    wanted: Collection[Key] = (),
) -> dict[Key, dict[str, Any]]:
    """Return what the files of the samples keep of their tokens, by sample.

    Of those that are `wanted` and not in `details`, as none that is trained on, what the engine says.
    """
    samples: dict[Key, Sample] = {(one.group_id, one.index): one for group in groups for one in group.samples}
    own = {key: TokenDetails.of_engine(samples[key]) for key in wanted if key in samples}
    merged: dict[Key, TokenDetails] = own | dict(details)
    known = {key: one for key, one in merged.items() if key in samples and one.values}
    return {key: one.record(samples[key].tokens, decode) for key, one in known.items()}


def eval_records(groups: Iterable[SampleGroup], decode: Callable[[Sequence[int]], str]) -> dict[Key, dict[str, Any]]:
    """Return what the file of an evaluation keeps of the tokens of the first answer to each of its prompts."""
    first = [replace(group, samples=group.samples[:1]) for group in groups]
    return sample_records(first, {}, decode, [(one.group_id, one.index) for group in first for one in group.samples])
