"""Clients of the teachers of on-policy distillation: an SGLang server returns the logprob of each sampled token.

With algorithm.distillation.topk it also returns the logprobs of the k most likely tokens at each position.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from grpo_mp.algorithms.distillation_settings import of_set
from grpo_mp.rewards.base import RewardError
from grpo_mp.rewards.reward_model import ReplyError, ServedModelClient, Server
from grpo_mp.rewards.settings import DATA_SET
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.splitting import split_by_size
from grpo_mp.utils.types import NO_TOKEN, Sample, SampleGroup, TopLogprobs

PATH = "/generate"
DETOKENIZE = "/v1/detokenize"
SECTION = "algorithm.distillation"  # of the settings; a teacher is named `teacher`, or `teacher.SET` below it
TEACHER = "teacher"
MAX_TOPK_VALUES = 2**22  # maximum number of logprobs in a reply, 11 bytes each; one sequence may exceed it
TOPK_REQUEST = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
TOPK_TOLERANCE = 1e-3  # by which a sum of probabilities may exceed 1: a bfloat16 teacher rounds
TOPK_ARRAYS = {"idx": np.dtype("<i4"), "val": np.dtype("<f4")}  # part of the field's name in a reply -> type


class TeacherClient(ServedModelClient):
    """Client of one teacher. Thread-safe."""

    wanted = "the logprobs of given tokens: serve a causal language model by SGLang"

    def __init__(
        self, settings: ServedModelConfig, topk: int | None = None, vocab_size: int = 0, name: str = TEACHER
    ) -> None:
        """Read the API key. `name`: see `DistillationConfig.names_by_set`."""
        self.section = f"{SECTION}.{name}"
        super().__init__(settings)
        self._topk = topk
        self._vocab_size = vocab_size

    def score_group(self, group: SampleGroup) -> SampleGroup:
        """Return the group with the teacher's logprobs of the response tokens."""
        sequences = [sequence for sample in group.samples for sequence in sample.sequences]
        try:
            requests = split_by_size(sequences, lambda one: len(one.tokens) * (self._topk or 0), MAX_TOPK_VALUES)
            scored = iter([one for part in requests for one in self._score(part)])
        except RewardError as failure:
            raise UserError(f"{self.section}: prompt {group.prompt.index}: {failure}") from failure
        samples = []
        for sample in group.samples:
            parts = [next(scored) for _ in sample.sequences]
            # The last sequence of an episode holds the earlier ones, see Sample.
            samples.append(replace(parts[-1], earlier=tuple(parts[:-1])))
        return replace(group, samples=tuple(samples))

    def check_reply(self) -> None:
        """Score one token, to check at the start that the teacher's replies are valid."""
        try:
            self._score([Sample.from_tokens(0, (0,), (0,))])
        except RewardError as failure:
            raise UserError(f"{self.section}: {failure}") from failure

    def _score(self, sequences: Sequence[Sample]) -> list[Sample]:
        """Return the sequences with the teacher's logprobs of their responses at temperature 1."""
        body = {
            "input_ids": [[*part.prompt_tokens, *part.tokens] for part in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The first entry, of the last prompt token, is null; the entries after it are of the response.
            "logprob_start_len": [len(part.prompt_tokens) - 1 for part in sequences],
            **({} if self._topk is None else TOPK_REQUEST | {"top_logprobs_num": self._topk}),
        }
        return self.ask(PATH, body, lambda reply: self._read(sequences, reply))

    def _read(self, sequences: Sequence[Sample], reply: Any) -> list[Sample]:
        metas = [output["meta_info"] for output in reply]
        tables = [meta["input_token_logprobs"][1:] for meta in metas]
        found = [[(float(logprob), int(token)) for logprob, token, *_ in table] for table in tables]
        if not same_tokens([part.tokens for part in sequences], [[token for _, token in table] for table in found]):
            raise ReplyError(
                "returned logprobs of other tokens than those that it was sent: a response may have one beyond the "
                "teacher's vocab_size"
            )
        if not all(math.isfinite(logprob) for table in found for logprob, _ in table):
            raise ReplyError("returned a logprob that is not finite")
        return [
            replace(
                part,
                teacher_logprobs=tuple(logprob for logprob, _ in table),
                teacher_topk=None if self._topk is None else self._read_topk(len(part.tokens), self._topk, meta),
            )
            for part, table, meta in zip(sequences, found, metas, strict=True)
        ]

    def _read_topk(self, length: int, topk: int, meta: Mapping[str, Any]) -> TopLogprobs:
        """Return the top k logprobs of a response from SGLang's flat arrays (0.5.23, tokenizer_manager.py).

        Tokens outside the policy's vocabulary become NO_TOKEN: some model families pad vocabularies to different sizes.
        """
        try:
            ids, logprobs = (
                np.frombuffer(base64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"], validate=True), dtype)
                for name, dtype in TOPK_ARRAYS.items()
            )
        except (ValueError, TypeError, KeyError) as error:
            raise ReplyError(
                "returned no top logprobs in flat arrays: serve the teacher by a version of SGLang that knows "
                "return_flat_raw_top_logprobs_b64, or set algorithm.distillation.topk=null"
            ) from error
        if not length * topk == len(ids) == len(logprobs):
            raise ReplyError(
                f"returned {len(logprobs)} top logprobs for {length} tokens, {topk} of each were asked for: it may "
                "have a smaller vocabulary; lower algorithm.distillation.topk"
            )
        ids = ids.reshape(length, topk)
        logprobs = logprobs.reshape(length, topk)
        with np.errstate(over="ignore"):
            mass = np.exp(logprobs).sum(1)
        if not np.isfinite(logprobs).all() or mass.max(initial=0.0) > 1 + TOPK_TOLERANCE:
            raise ReplyError("returned top logprobs that are of no distribution")
        known = (ids >= 0) & (ids < self._vocab_size)
        return TopLogprobs(np.where(known, ids, NO_TOKEN).astype(np.int32), logprobs.astype(np.float32))


class Teachers:
    """The teachers of a run; the teacher of a prompt's data set scores its group. Thread-safe."""

    def __init__(self, clients: Mapping[str, TeacherClient], by_set: Mapping[str, str]) -> None:
        """`clients`: by name, without the policy itself. `by_set`: see `DistillationConfig.names_by_set`."""
        self._clients = clients
        self._by_set = by_set

    def score_group(self, group: SampleGroup) -> SampleGroup:
        """Return the group with the logprobs of its teacher, see `TeacherClient.score_group`."""
        teacher = self._clients.get(of_set(self._by_set, group.prompt.columns.get(DATA_SET)))
        return teacher.score_group(group) if teacher else group

    def connect(self, name: str, servers: Sequence[Server]) -> None:
        """Set the servers, which the job has started, of a teacher."""
        self._clients[name].connect(servers)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def is_teacher(name: str) -> bool:
    """Return whether a model that the job serves is a teacher."""
    return name.partition(".")[0] == TEACHER


def same_tokens(sent: Sequence[Sequence[int]], echoed: Sequence[Sequence[int]]) -> bool:
    """Return whether a server's logprobs belong to the tokens that it was sent.

    SGLang (0.5.23, logprob_result_processor.py) echoes the last token of its vocabulary as 0, with the right logprob.
    It also echoes tokens beyond its vocabulary as 0, with wrong logprobs. So at most one distinct token may be echoed
    as 0.
    """
    if [len(tokens) for tokens in sent] != [len(tokens) for tokens in echoed]:
        return False
    pairs = {pair for one, other in zip(sent, echoed, strict=True) for pair in zip(one, other, strict=True)}
    different = {(token, shown) for token, shown in pairs if token != shown}
    return not different or (len(different) == 1 and all(shown == 0 for _, shown in different))


def check_served_tokens(client: TeacherClient, tokenizer: PreTrainedTokenizerBase) -> str:
    """Check that policy and teacher server have the same vocabulary; return a warning if the server does not answer."""
    numbers = sorted(tokenizer.get_vocab().values())
    try:
        body = {"tokens": [[i] for i in numbers], "skip_special_tokens": False}
        served = client.ask(DETOKENIZE, body, lambda reply: list(reply["text"]))
    except RewardError as error:
        return f"{client.section}: its tokenizer could not be compared with the policy's ({one_line(error, 200)})"
    own = [tokenizer.decode([i], skip_special_tokens=False) for i in numbers]
    different = [i for i, (mine, theirs) in enumerate(zip_longest(own, served)) if mine != theirs]
    if different:
        first = different[0]
        raise UserError(
            f"{client.section}.path: {len(different)} of the policy's {len(own)} tokens are others there, such as "
            f"{numbers[first]}: {served[first : first + 1]} instead of {own[first]!r}: take one of the same family"
        )
    return ""


def first_difference(policy: dict[str, int], teacher: dict[str, int]) -> str:
    """Describe in words where two vocabularies differ; "" if they are equal."""
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
