"""Reward models behind HTTP: an SGLang server with a reward head scores whole responses, or each step of them."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any, ClassVar

import httpx

from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.settings import StepModelConfig
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.redact import mask_headers, split_login
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import SampleGroup

PATH = "/classify"  # SGLang's "reward model request": {"input_ids"} to [{"embedding": [score], "meta_info"}, ...]
KEEPALIVE_S = 2.0  # less than the five seconds after which SGLang closes an idle connection
KEY = re.compile(r"[!-~]*")  # printable ASCII without blanks: what a header takes, and errors do not repeat
Decode = Callable[[list[int]], str]


def read_api_key(section: str, variable: str | None) -> str:
    """Return the key that an environment variable holds, without blanks around it; empty for None."""
    if variable is None:
        return ""
    if variable not in os.environ:
        raise UserError(f"{section}.api_key_env: {variable} is not set in the environment: export it")
    key = os.environ[variable].strip()  # what was read from a file ends with a new line
    if not KEY.fullmatch(key):
        raise UserError(
            f"{section}.api_key_env: {variable} holds a blank, a control character or one that is not ASCII, which no "
            "key has: export the key alone"
        )
    return key


def read_address(setting: str, address: str) -> tuple[str, dict[str, str]]:
    """Return a server's address without its login, and the header that sends that instead."""
    try:
        url, login = split_login(address)
        url.encode()
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise UserError(f"{setting}: no address of a server: write http://HOST:PORT") from error
    return url, login


def shown_text(text: str | bytes, headers: Mapping[str, str]) -> str:
    """Return a reply, or an error of the request with these headers, as it may be shown: one line, without secrets.

    A reply's bytes are read as UTF-8, whatever charset it names: Python has some that cannot be read as text.
    """
    return one_line(mask_headers(text if isinstance(text, str) else text.decode(errors="replace"), headers))


@dataclass(frozen=True)
class Server:
    """Where a reward model is served, and the headers of requests to it."""

    url: str
    headers: Mapping[str, str]


class ServedModelClient:
    """Client of a model that scores tokens. Thread-safe."""

    section: ClassVar[str]  # of the settings

    def __init__(self, settings: ServedModelConfig) -> None:
        """Open no connection yet: the server may come up later."""
        self._retries = settings.retries
        key = read_api_key(self.section, settings.api_key_env)
        url, login = read_address(f"{self.section}.url", settings.url or "")
        self._servers = cycle([Server(url, ({"Authorization": f"Bearer {key}"} if key else {}) | login)])
        # trust_env is off: a proxy of the environment would be asked for loopback addresses, too.
        self._http = httpx.Client(
            timeout=settings.timeout_s,
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )

    def connect(self, servers: Sequence[Server]) -> None:
        """Ask these servers, in turn, that the job itself has started."""
        self._servers = cycle(servers)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, path: str, body: dict[str, Any]) -> tuple[str, httpx.Response, str]:
        """Return the endpoint, its reply, and that as it may be shown. Raises RewardError."""
        server, failure = next(self._servers), ""
        endpoint = f"{server.url.rstrip('/')}{path}"
        for _ in range(self._retries + 1):
            try:
                reply = self._http.post(endpoint, json=body, headers=server.headers)
            except httpx.HTTPError as error:  # no connection, or a body that cannot be unpacked
                failure = f"gave no answer ({type(error).__name__}: {shown_text(str(error), server.headers)})"
                continue
            shown = shown_text(reply.content, server.headers)
            if reply.is_success:
                return endpoint, reply, shown
            failure = f"answered status {reply.status_code}: {shown}"
            if reply.status_code < 500 and reply.status_code != 429:
                break
        raise RewardError(f"{endpoint} {failure}")


class ModelClient(ServedModelClient):
    """Client of a reward model. Thread-safe."""

    section = "reward.model"

    def values(self, group: SampleGroup) -> Values:
        """Return one score per sample, read at the last token of prompt and response, which are sent as token ids.

        Raises RewardError: no answer, an error status, or an answer that is not one score per sample.
        """
        return [*self.scores([[*sample.prompt_tokens, *sample.tokens] for sample in group.samples])]

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return one score per sequence of token ids, read at its last token. Raises RewardError as `values` does."""
        endpoint, reply, shown = self._post(PATH, {"input_ids": [list(sequence) for sequence in sequences]})
        try:
            vectors = [entry["embedding"] for entry in reply.json()]
            scores = [float(score) for (score,) in vectors]
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise RewardError(
                f"{endpoint} answered {shown!r}, not one score per sequence: serve a model with one label"
            ) from error
        return scores


class StepModelClient(ModelClient):
    """Client of a process reward model. Thread-safe.

    A causal model's score at the end of a step depends on nothing after it: it is the score of the response cut there.
    """

    section = "reward.steps"

    def __init__(self, settings: StepModelConfig, decode: Decode) -> None:
        """Store `decode`, the policy's tokenizer. Opens no connection."""
        super().__init__(settings)
        self._separator = settings.separator
        self._decode_token = cache(lambda token: decode([token]))

    def score_steps(self, group: SampleGroup) -> list[list[tuple[int, float]]]:
        """Score every step of every sample: (index of the step's last token, score). Raises RewardError."""
        ends = [
            step_ends([self._decode_token(token) for token in sample.tokens], self._separator, sample.generated)
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


def step_ends(pieces: Sequence[str], separator: str, generated: Sequence[bool] = ()) -> list[int]:
    """Find the last token of each step: the one that completes the separator, and the last of each turn.

    `pieces` are the texts of the tokens, `generated` whether the policy wrote them, (): all of them. What an episode
    was given is of no step. Blank steps end with the one before them.
    """
    ends, text, own = list[int](), "", [*generated] or [True] * len(pieces)
    for index, piece in enumerate(pieces):
        text += piece if own[index] else ""
        ends_turn = own[index] and not (index + 1 < len(own) and own[index + 1])
        if text.strip() and (separator in text or ends_turn):
            ends.append(index)
            text = ""
    if not ends:
        ends = [index for index, is_own in enumerate(own) if is_own][-1:]
    return ends
