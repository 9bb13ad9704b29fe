"""The teacher of on-policy distillation behind HTTP: an SGLang server gives the logprob of each sampled token."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp.errors import UserError, one_line
from grpo_mp.rewards.base import RewardError
from grpo_mp.rewards.reward_model import ServedModelClient
from grpo_mp.section import ServedModelConfig
from grpo_mp.types import Sample, SampleGroup

PATH, DETOKENIZE = "/generate", "/v1/detokenize"
CHECK_LIMIT_S = 30.0
SECTION = "algorithm.distillation.teacher"  # of the settings


class TeacherClient(ServedModelClient):
    """Client of a teacher. Thread-safe."""

    section = SECTION

    def score_group(self, group: SampleGroup) -> SampleGroup:
        """Return the group with the teacher's logprob of each token of its responses, in one call.

        Raises UserError where the teacher gives no answer, or one that is not of these tokens.
        """
        sequences = [sequence for sample in group.samples for sequence in sample.sequences]
        try:
            logprobs = iter(self._logprobs(sequences))
        except RewardError as failure:
            raise UserError(f"{SECTION}: prompt {group.prompt.index}: {failure}") from failure
        samples = []
        for sample in group.samples:
            parts = [replace(part, teacher_logprobs=next(logprobs)) for part in sample.sequences]
            samples.append(replace(parts[-1], earlier=tuple(parts[:-1])))
        return replace(group, samples=tuple(samples))

    def _logprobs(self, sequences: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return the logprobs of each sequence's response at temperature 1, given its prompt. Raises RewardError."""
        body = {
            "input_ids": [[*part.prompt_tokens, *part.tokens] for part in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The entry of the last prompt token is null; those behind it are of the response.
            "logprob_start_len": [len(part.prompt_tokens) - 1 for part in sequences],
        }
        endpoint, reply, shown = self._post(PATH, body)
        try:
            tables = [output["meta_info"]["input_token_logprobs"][1:] for output in reply.json()]
            found = [[(float(logprob), int(token)) for logprob, token, *_ in table] for table in tables]
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise RewardError(
                f"{endpoint} answered {shown!r}, not the logprobs of given tokens: serve a causal language model by "
                "SGLang"
            ) from error
        expected = [list(part.tokens) for part in sequences]
        if not same_tokens(expected, [[token for _, token in table] for table in found]):
            raise RewardError(
                f"{endpoint} returned logprobs of other tokens than those that it was sent: a response may have one "
                "beyond the teacher's vocab_size"
            )
        if not all(math.isfinite(logprob) for table in found for logprob, _ in table):
            raise RewardError(f"{endpoint} returned a logprob that is not finite: the teacher computes NaN, or never 0")
        return [tuple(logprob for logprob, _ in table) for table in found]


def same_tokens(sent: Sequence[Sequence[int]], echoed: Sequence[Sequence[int]]) -> bool:
    """Return whether a server's logprobs are of the tokens that it was sent.

    SGLang (0.5.23, logprob_result_processor.py) shows the last token of its vocabulary, whose logprob is right, as 0,
    and so those beyond, whose logprobs are of the last one. One token may be shown so, then: a second one is beyond.
    """
    if [len(tokens) for tokens in sent] != [len(tokens) for tokens in echoed]:
        return False
    pairs = {pair for one, other in zip(sent, echoed, strict=True) for pair in zip(one, other, strict=True)}
    different = {(token, shown) for token, shown in pairs if token != shown}
    return not different or (len(different) == 1 and all(shown == 0 for _, shown in different))


def check_served_tokens(settings: ServedModelConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Ask a server at `url` for the text of each of the policy's tokens; return a warning where it cannot be asked.

    Raises UserError where a token is another there, and where the key is not set.
    """
    limit_s = min(settings.timeout_s, CHECK_LIMIT_S)
    client = TeacherClient(settings.model_copy(update={"retries": 0, "timeout_s": limit_s}))
    numbers = sorted(tokenizer.get_vocab().values())
    try:
        endpoint, reply, _ = client._post(DETOKENIZE, {"tokens": [[i] for i in numbers], "skip_special_tokens": False})
        served = reply.json()["text"]
        if not isinstance(served, list):
            raise TypeError(f"{DETOKENIZE} gave no list of texts")
    except (RewardError, ValueError, TypeError, LookupError, RecursionError) as error:
        return f"{SECTION}: its tokenizer could not be compared with the policy's ({one_line(error, 200)})"
    finally:
        client.close()
    own = [tokenizer.decode([i], skip_special_tokens=False) for i in numbers]
    different = [i for i, (mine, theirs) in enumerate(zip_longest(own, served)) if mine != theirs]
    if different:
        first = different[0]
        raise UserError(
            f"{SECTION}.url: {endpoint}: {len(different)} of the policy's {len(own)} tokens are others there, such as "
            f"{numbers[first]}: {served[first : first + 1]} instead of {own[first]!r}: take one of the same family"
        )
    return ""


def first_difference(policy: dict[str, int], teacher: dict[str, int]) -> str:
    """Say in words where two vocabularies differ; "" where they are the same."""
    by_id: list[dict[int, Any]] = [{number: token for token, number in one.items()} for one in (policy, teacher)]
    different = sorted(
        number for number in by_id[0].keys() | by_id[1].keys() if by_id[0].get(number) != by_id[1].get(number)
    )
    if not different:
        return ""
    number = different[0]
    return (
        f"{len(different)} of its {len(teacher)} tokens are not those of the policy's {len(policy)}: {number} is "
        f"{by_id[1].get(number)!r}, and the policy's is {by_id[0].get(number)!r}"
    )
