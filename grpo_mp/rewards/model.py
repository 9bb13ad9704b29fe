"""A reward model behind HTTP: an SGLang server with a reward head scores whole groups."""

import os
from collections.abc import Sequence
from typing import Any

import httpx

from grpo_mp.errors import UserError
from grpo_mp.rewards.settings import RewardModelConfig
from grpo_mp.rewards.timeouts import RewardError, Values
from grpo_mp.types import SampleGroup

PATH = "/classify"  # SGLang's "reward model request": {"input_ids"} to [{"embedding": [score], "meta_info"}, ...]
MESSAGE_CHARACTERS = 300
KEEPALIVE_S = 2.0  # less than the five seconds after which SGLang closes an idle connection


class ModelClient:
    """Client of one server. Thread-safe."""

    def __init__(self, settings: RewardModelConfig) -> None:
        """Open no connection yet: the server may come up later. Raises UserError where the key is not set."""
        self._retries = settings.retries
        self._endpoint = f"{settings.url.rstrip('/')}{PATH}"
        # trust_env is off: a proxy of the environment would be asked for loopback addresses, too.
        self._http = httpx.Client(
            timeout=settings.timeout_s,
            trust_env=False,
            headers=_auth_headers(settings.api_key_env),
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def values(self, group: SampleGroup, step: int) -> Values:
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
                f"{self._endpoint} answered {_excerpt(reply)!r}, not one score per sequence: "
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
            failure = f"answered status {reply.status_code}: {_excerpt(reply)}"
            if reply.status_code < 500 and reply.status_code != 429:
                break
        raise RewardError(f"{self._endpoint} {failure}")


def _auth_headers(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if variable not in os.environ:
        raise UserError(f"reward.model.api_key_env: {variable} is not set in the environment: export it")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _excerpt(reply: httpx.Response) -> str:
    return " ".join(reply.text[:MESSAGE_CHARACTERS].split())
