"""Reward models behind HTTP: an SGLang server with a reward head scores whole responses, or each step of them."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import httpx

from grpo_mp.errors import UserError, one_line
from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.settings import RewardModelConfig, StepModelConfig
from grpo_mp.types import SampleGroup

PATH = "/classify"  # SGLang's "reward model request": {"input_ids"} to [{"embedding": [score], "meta_info"}, ...]
KEEPALIVE_S = 2.0  # less than the five seconds after which SGLang closes an idle connection
Decode = Callable[[list[int]], str]


class ModelClient:
    """Client of one server. Thread-safe."""

    section = "reward.model"  # of the settings

    def __init__(self, settings: RewardModelConfig) -> None:
        """Open no connection yet: the server may come up later. Raises UserError where the key is not set."""
        self._retries = settings.retries
        self._endpoint = f"{settings.url.rstrip('/')}{PATH}"
        key, headers = settings.api_key_env, dict[str, str]()
        if key is not None:
            if key not in os.environ:
                raise UserError(f"{self.section}.api_key_env: {key} is not set in the environment: export it")
            headers = {"Authorization": f"Bearer {os.environ[key]}"}
        # trust_env is off: a proxy of the environment would be asked for loopback addresses, too.
        self._http = httpx.Client(
            timeout=settings.timeout_s,
            trust_env=False,
            headers=headers,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def values(self, group: SampleGroup) -> Values:
        """Return one score per sample, read at the last token of prompt and response, which are sent as token ids.

        Raises RewardError: no answer, an error status, or an answer that is not one score per sample.
        """
        return [*self.scores([[*sample.prompt_tokens, *sample.tokens] for sample in group.samples])]

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return one score per sequence of token ids, read at its last token. Raises RewardError as `values` does."""
        reply = self._post({"input_ids": [list(sequence) for sequence in sequences]})
        try:
            vectors = [entry["embedding"] for entry in reply.json()]
            scores = [float(score) for (score,) in vectors]
        except (ValueError, TypeError, KeyError) as error:
            raise RewardError(
                f"{self._endpoint} answered {one_line(reply.text)!r}, not one score per sequence: "
                "serve a model with one label"
            ) from error
        return scores

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        failure = ""
        for _ in range(self._retries + 1):
            try:
                reply = self._http.post(self._endpoint, json=body)
            except httpx.TransportError as error:
                failure = f"gave no answer ({type(error).__name__}: {error})"
                continue
            if reply.is_success:
                return reply
            failure = f"answered status {reply.status_code}: {one_line(reply.text)}"
            if reply.status_code < 500 and reply.status_code != 429:
                break
        raise RewardError(f"{self._endpoint} {failure}")


class StepModelClient(ModelClient):
    """Client of a process reward model. Thread-safe.

    A causal model's score at the end of a step depends on nothing after it: it is the score of the response cut there.
    """

    section = "reward.steps"

    def __init__(self, settings: StepModelConfig, decode: Decode) -> None:
        """Take `decode`, the policy's tokenizer. Opens no connection. Raises UserError where the key is not set."""
        super().__init__(settings)
        self._separator = settings.separator
        self._decode_token = cache(lambda token: decode([token]))

    def score_steps(self, group: SampleGroup) -> list[list[tuple[int, float]]]:
        """Score every step of every sample: (index of the step's last token, score). Raises RewardError."""
        ends = [
            step_ends([self._decode_token(token) for token in sample.tokens], self._separator)
            for sample in group.samples
        ]
        prefixes = [
            [*sample.prompt_tokens, *sample.tokens[: end + 1]]
            for sample, sample_ends in zip(group.samples, ends, strict=True)
            for end in sample_ends
        ]
        scores = self.scores(prefixes)
        if len(scores) != len(prefixes):
            raise RewardError(f"the process reward model returned {len(scores)} scores for {len(prefixes)} steps")
        remaining = iter(scores)
        return [[(end, next(remaining)) for end in sample_ends] for sample_ends in ends]


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """Find the last token of each step: the one that completes the separator, and the response's last.

    `pieces` are the texts of the tokens. Blank steps end with the one before them.
    """
    ends: list[int] = []
    text = ""
    for index, piece in enumerate(pieces):
        text += piece
        if separator in text and text.strip():
            ends.append(index)
            text = ""
    if text.strip() or not ends:
        ends.append(len(pieces) - 1)
    return ends
