"""HTTP clients of reward models, which score responses or steps, and of a judge, which writes scores as text."""

import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import httpx

from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.settings import JUDGE_FIELDS, JUDGE_TEMPLATE, LARGEST_SCORE, JudgeConfig, RewardModelConfig
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.redact import without_secrets
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

PATH = "/classify"  # SGLang's reward model request: {"input_ids"} -> [{"embedding": [score], "meta_info"}, ...]
JUDGE_PATH = "/chat/completions"
SCORE = re.compile(r"(?i)score[\s:*]*(-?\d+(?:\.\d+)?)")
CONCURRENT_REQUESTS = 32  # to a judge, per rank
SEPARATOR = "\n\n"  # ends a step; the last step ends with the response
RETRIES = 2  # of a request to a served model or judge
BACKOFF_S = 1.0  # before the first retry, doubled before each further one, times 0.5 to 1.5 at random
JUDGE_TIMEOUT_S = 60.0  # of a request, which scores one response
TIMEOUT_S = 300.0  # of a request, which scores one group
KEEPALIVE_S = 2.0  # less than the five seconds after which SGLang closes an idle connection
LOOPBACK = ("localhost", "127.0.0.1", "::1")
Decode = Callable[[list[int]], str]
T = TypeVar("T")


class ReplyError(Exception):
    """An invalid reply that a retry would not change; the message says why it is invalid."""


@dataclass(frozen=True)
class Server:
    """URL of a served model, and the HTTP headers of requests to it."""

    url: str
    headers: Mapping[str, str]


class ServedModelClient:
    """HTTP client of a served model, with retries. Thread-safe."""

    section: str  # of the settings, for messages
    wanted: ClassVar[str]  # content of a valid reply, for messages

    def __init__(self, settings: ServedModelConfig | JudgeConfig) -> None:
        """Read the API key. The first request opens a connection, because the server may start later."""
        variable = settings.api_key_env
        if variable and variable not in os.environ:
            raise UserError(f"{self.section}.api_key_env: {variable} is not set in the environment: export it")
        self._key = os.environ[variable].strip() if variable else ""
        self._servers = cycle([Server(settings.url, {"Authorization": f"Bearer {self._key}"} if self._key else {})])
        self._http = httpx.Client(
            timeout=JUDGE_TIMEOUT_S if isinstance(settings, JudgeConfig) else TIMEOUT_S,
            # A proxy of the environment leads to endpoints outside of the cluster, not to the cluster's servers.
            trust_env=isinstance(settings, JudgeConfig) and urlsplit(settings.url).hostname not in LOOPBACK,
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        )

    def connect(self, servers: Sequence[Server]) -> None:
        self._servers = cycle(servers)

    def close(self) -> None:
        self._http.close()

    def ask(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Post `body` to the next server; return `read` of the reply's JSON. Raises RewardError if all tries fail."""
        server = next(self._servers)
        failure = ""
        text = ""
        endpoint = f"{server.url.rstrip('/')}{path}"
        for attempt in range(RETRIES + 1):
            if attempt:  # exponential backoff with jitter, so that ranks do not retry together
                time.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                reply = self._http.post(endpoint, json=body, headers=server.headers)
                text = reply.content.decode(errors="replace")
                if reply.is_success:
                    return read(reply.json())
                failure = f"answered status {reply.status_code}: {text}"
                if reply.status_code < 500 and reply.status_code not in (408, 429):
                    break
            except httpx.HTTPError as error:  # no connection, or a body that cannot be decompressed
                failure = f"gave no answer ({type(error).__name__}: {error})"
            except ReplyError as error:
                failure = str(error)
                break
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
                failure = f"answered {text!r:.300}, not {self.wanted}"
        shown = f"{endpoint} {failure}"
        raise RewardError(one_line(without_secrets(shown.replace(self._key, "***") if self._key else shown)))


class ModelClient(ServedModelClient):
    """Client of a reward model that scores whole responses."""

    section = "reward.model"
    wanted = "one score per sequence: serve a model with one label"

    def values(self, group: SampleGroup) -> Values:
        """Return one score per sample, read at the last token of prompt and response, which are sent as token ids."""
        return [*self.scores([[*sample.prompt_tokens, *sample.tokens] for sample in group.samples])]

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return one score per sequence of token ids, read at its last token."""

        def read(reply: Any) -> list[float]:
            scores = [float(score) for entry in reply for (score,) in [entry["embedding"]]]
            if len(scores) != len(sequences):
                raise ReplyError(f"returned {len(scores)} scores for {len(sequences)} sequences")
            return scores

        return self.ask(PATH, {"input_ids": [list(sequence) for sequence in sequences]}, read)


class StepModelClient(ModelClient):
    """Client of a process reward model.

    The model is causal, so the score at the end of a step equals the score of the response cut there.
    """

    def __init__(self, settings: RewardModelConfig, decode: Decode) -> None:
        super().__init__(settings)
        self._decode_token = cache(lambda token: decode([token]))

    def score_steps(self, group: SampleGroup) -> list[list[tuple[int, float]]]:
        """Return for each sample the (index of the step's last token, score) of every step."""
        ends = [
            step_ends([self._decode_token(token) for token in sample.tokens], sample.generated)
            for sample in group.samples
        ]
        prefixes = [
            [*sample.prompt_tokens, *sample.tokens[: end + 1]]
            for sample, sample_ends in zip(group.samples, ends, strict=True)
            for end in sample_ends
        ]
        remaining = iter(self.scores(prefixes))
        return [[(end, next(remaining)) for end in sample_ends] for sample_ends in ends]


def step_ends(pieces: Sequence[str], generated: Sequence[bool] = ()) -> list[int]:
    """Return the index of each step's last token: a token that completes SEPARATOR, or the last token of a turn.

    pieces: text of each token; generated: whether the policy generated each token, (): all. Other tokens of an episode
    belong to no step. Blank text alone is no step.
    """
    ends = list[int]()
    text = ""
    own = [*generated] or [True] * len(pieces)
    for index, piece in enumerate(pieces):
        text += piece if own[index] else ""
        ends_turn = own[index] and not (index + 1 < len(own) and own[index + 1])
        if text.strip() and (SEPARATOR in text or ends_turn):
            ends.append(index)
            text = ""
    if not ends:
        ends = [index for index, is_own in enumerate(own) if is_own][-1:]
    return ends


class Judge(ServedModelClient):
    """Client of one judge. Thread-safe; at most CONCURRENT_REQUESTS requests are in flight per rank."""

    section = "reward.judge"
    wanted = "a chat completion with 'Score: N' from 0 to 10"

    def __init__(self, settings: JudgeConfig) -> None:
        super().__init__(settings)
        self._settings = settings
        self._threads = ThreadPoolExecutor(CONCURRENT_REQUESTS, "judge")

    def close(self) -> None:
        self._threads.shutdown()
        super().close()

    def values(self, group: SampleGroup) -> Values:
        """Return one value from 0 to 1 per sample; equal answers are judged once.

        Raises RewardError if a sample gets no score; the error carries the values of the other samples.
        """
        contents = [self._content(group.prompt, sample) for sample in group.samples]
        distinct = [*dict.fromkeys(contents)]
        verdicts = dict(zip(distinct, self._threads.map(self._ask, distinct), strict=True))
        results = [verdicts[content] for content in contents]
        scored = {i: result for i, result in enumerate(results) if isinstance(result, float)}
        for i, result in enumerate(results):
            if isinstance(result, RewardError):
                raise RewardError(f"{self._settings.model} at {result}", i, scored)
        return [*scored.values()]

    def _content(self, prompt: Prompt, sample: Sample) -> str:
        """Fill in the judge's template for one answer or episode."""
        fields = {
            "question": prompt.text,
            "answer": sample.text,
            "conversation": conversation(prompt, sample),
            "reference": prompt.answer or "(none)",
        }
        template = self._settings.template or JUDGE_TEMPLATE
        # One pass, so that braces in the inserted texts stay as they are.
        return JUDGE_FIELDS.sub(lambda match: fields[match[1]], template)

    def _ask(self, content: str) -> float | RewardError:
        messages = [{"role": "user", "content": content}]
        body = {**self._settings.request, "model": self._settings.model, "messages": messages}
        try:
            return self.ask(JUDGE_PATH, body, self._read)
        except RewardError as error:
            return error

    def _read(self, reply: Mapping[str, Any]) -> float:
        """Return the last score of a reply, scaled to [0, 1]. Raises ValueError or LookupError if there is none."""
        number = float(SCORE.findall(reply["choices"][0]["message"]["content"])[-1])
        if not 0 <= number <= LARGEST_SCORE:
            raise ValueError(f"{number} is out of range")
        return number / LARGEST_SCORE


def conversation(prompt: Prompt, sample: Sample) -> str:
    """Return the messages of prompt and episode as JSON, one per line, so that no text can pose as another message."""
    given = prompt.messages or ({"role": "user", "content": prompt.text},)
    answered = sample.messages or ({"role": "assistant", "content": sample.text},)
    return "\n".join(json.dumps(message, ensure_ascii=False, default=str) for message in (*given, *answered))
