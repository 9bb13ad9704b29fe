"""A judge: a model behind an OpenAI-compatible endpoint reads question, answer and reference, and writes a number."""

import asyncio
import hashlib
import json
import random
import re
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from grpo_mp.rewards.base import RewardError, Values
from grpo_mp.rewards.reward_model import read_address, read_api_key, shown_text
from grpo_mp.rewards.settings import BACKOFF_S, JUDGE_EPISODE_TEMPLATE, JUDGE_FIELDS, JUDGE_TEMPLATE, JudgeConfig
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import encodable
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

CONCURRENT_REQUESTS = 32
PATH = "/chat/completions"
LOCK_LIMIT_S = 60.0  # for which a rank waits while others write the cache
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class NoVerdictError(Exception):
    """The judge gave no number; `is_final` where asking again would not help."""

    def __init__(self, reason: str, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class Judge:
    """Client of one judge. Thread-safe: at most CONCURRENT_REQUESTS of the rank are in flight."""

    def __init__(self, settings: JudgeConfig) -> None:
        """Open the cache, and no connection yet."""
        self._settings = settings
        key = read_api_key("reward.judge", settings.api_key_env)
        url, login = read_address("reward.judge.url", settings.url)
        self._endpoint = f"{url.rstrip('/')}{PATH}"
        self._headers = ({"Authorization": f"Bearer {key}"} if key else {}) | login
        self._http = httpx.AsyncClient(
            timeout=None,  # the limit below is of the whole request
            # A proxy of the environment would be asked for loopback addresses, too.
            trust_env=urlsplit(settings.url).hostname not in LOOPBACK,
            headers=self._headers,
            limits=httpx.Limits(max_connections=CONCURRENT_REQUESTS),
        )
        self._slots = asyncio.Semaphore(CONCURRENT_REQUESTS)
        self._cache = ReplyCache(settings.cache) if settings.cache else None
        self._loop = EventLoopThread("judge")

    def close(self) -> None:
        """Close connections and cache."""
        self._loop.run(self._http.aclose())
        self._loop.close()
        if self._cache:
            self._cache.close()

    def values(self, group: SampleGroup) -> Values:
        """Return one value from 0 to 1 per sample; equal answers are judged once.

        Raises RewardError where the judge gives no number for a sample; it holds the values of the others.
        """
        bodies = [self._request(group.prompt, sample) for sample in group.samples]
        verdicts = self._verdicts(dict.fromkeys(bodies))
        results = [verdicts[body] for body in bodies]
        scored = {i: result for i, result in enumerate(results) if isinstance(result, float)}
        for i, result in enumerate(results):
            if isinstance(result, NoVerdictError):
                raise RewardError(f"{self._settings.model} at {self._endpoint} {result}", i, scored)
        return [*scored.values()]

    def _request(self, prompt: Prompt, sample: Sample) -> str:
        """Return the body of the request for one answer or episode."""
        lowest, highest = self._settings.scores
        fields = {
            "question": prompt.text,
            "answer": sample.text,
            "conversation": conversation(prompt, sample),
            "reference": prompt.answer or "(none)",
            "lowest": f"{lowest:g}",
            "highest": f"{highest:g}",
        }
        template = self._settings.template or (JUDGE_EPISODE_TEMPLATE if sample.messages else JUDGE_TEMPLATE)
        content = JUDGE_FIELDS.sub(lambda match: fields[match[1]], template)  # once: not in what it fills in
        messages = [{"role": "user", "content": content}]
        return json.dumps({**self._settings.request, "model": self._settings.model, "messages": messages})

    def _verdicts(self, bodies: Iterable[str]) -> dict[str, float | NoVerdictError]:
        """Return the value for each request, from the cache or the judge; the error where there is none."""
        verdicts: dict[str, float | NoVerdictError] = {}
        for body, reply in (self._cache.get(bodies) if self._cache else {}).items():
            try:
                verdicts[body] = self._read_value(reply)
            except NoVerdictError:
                continue  # it was kept under another pattern: ask again
        missing = [body for body in bodies if body not in verdicts]
        replies = dict(zip(missing, self._loop.run(self._ask_all(missing)), strict=True))
        answered = {body: reply for body, reply in replies.items() if isinstance(reply, str)}
        if self._cache and answered:
            self._cache.put(answered)
        read = {body: self._read_value(reply) for body, reply in answered.items()}
        return verdicts | read | {b: reply for b, reply in replies.items() if isinstance(reply, NoVerdictError)}

    async def _ask_all(self, bodies: Iterable[str]) -> list[str | NoVerdictError]:
        return await asyncio.gather(*map(self._ask, bodies))

    async def _ask(self, body: str) -> str | NoVerdictError:
        """Return a reply that holds a number, after `retries` more attempts at most."""
        for attempt in range(self._settings.retries + 1):
            if attempt:  # exponential backoff with jitter, so that ranks do not come back together
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                async with self._slots:
                    text = await self._post(body)
                self._read_value(text)
                return text
            except NoVerdictError as error:
                last = error
                if error.is_final:
                    break
        return last

    async def _post(self, body: str) -> str:
        """Send one request; return the text of the reply. Raises NoVerdictError."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                reply = await self._http.post(
                    self._endpoint, content=body, headers={"Content-Type": "application/json"}
                )
        except TimeoutError:
            raise NoVerdictError(f"gave no answer in reward.judge.timeout_s={self._settings.timeout_s:g} s") from None
        except httpx.HTTPError as error:  # no connection, or a body that cannot be unpacked
            raise NoVerdictError(f"gave no answer ({type(error).__name__}: {self._shown(str(error))})") from error
        shown = self._shown(reply.content)
        if not reply.is_success:
            is_final = reply.status_code < 500 and reply.status_code not in (408, 429)
            raise NoVerdictError(f"answered status {reply.status_code}: {shown}", is_final)
        try:
            text = reply.json()["choices"][0]["message"]["content"]
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise NoVerdictError(f"answered no chat completion: {shown!r}") from error
        if not isinstance(text, str | None):
            raise NoVerdictError(f"answered with a content that is no text, {type(text).__name__}: {shown!r}")
        return encodable(text or "")

    def _shown(self, text: str | bytes) -> str:
        return shown_text(text, self._headers)

    def _read_value(self, text: str) -> float:
        """Return a reply's number as a value from 0 to 1. Raises NoVerdictError."""
        number = read_number(text, self._settings)
        lowest, highest = self._settings.scores
        if number is None or not lowest <= number <= highest:
            found = "no number" if number is None else f"{number:g}"
            asked = f"from {lowest:g} to {highest:g} is asked"
            raise NoVerdictError(f"gave {found} by {self._settings.pattern}, {asked}: {self._shown(text)!r}")
        return (number - lowest) / (highest - lowest)


def conversation(prompt: Prompt, sample: Sample) -> str:
    """Return all messages of prompt and episode, one a line, as JSON: what a tool wrote cannot pass for another's."""
    given = prompt.messages or ({"role": "user", "content": prompt.text},)
    answered = sample.messages or ({"role": "assistant", "content": sample.text},)
    return "\n".join(json.dumps(message, ensure_ascii=False, default=str) for message in (*given, *answered))


def read_number(text: str, settings: JudgeConfig) -> float | None:
    """Return the last number that a reply gives by `pattern`; None where there is none."""
    found = [match[1] for match in re.finditer(settings.pattern, text)]
    try:
        return float(found[-1]) if found else None
    except ValueError:
        return None


class ReplyCache:
    """Replies on disk, by the hash of the request with its model and prompt. Threads and processes may share it."""

    def __init__(self, path: Path) -> None:
        """Open or create the file."""
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=LOCK_LIMIT_S, check_same_thread=False)
            self._execute("CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL)", [()])
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"reward.judge.cache {path}: {error}: give a file on a local or locking disk") from error

    def get(self, bodies: Iterable[str]) -> Mapping[str, str]:
        """Return the replies to those requests that have one. Raises RewardError where the file cannot be read."""
        found = {body: self._query(_hash(body)) for body in bodies}
        return {body: reply for body, reply in found.items() if reply is not None}

    def put(self, replies: Mapping[str, str]) -> None:
        """Keep replies by request. Raises RewardError where the file cannot be written."""
        rows = [(_hash(body), encodable(reply)) for body, reply in replies.items()]
        try:
            self._execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            raise RewardError(f"reward.judge.cache {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _execute(self, statement: str, rows: Sequence[tuple[str, ...]]) -> None:
        with self._lock, self._database:  # one transaction
            self._database.executemany(statement, rows)

    def _query(self, key: str) -> str | None:
        try:
            with self._lock:
                row = self._database.execute("SELECT reply FROM replies WHERE request = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise RewardError(f"reward.judge.cache {self._path}: {error}") from error
        return row[0] if row else None


def _hash(body: str) -> str:
    return hashlib.sha256(body.encode(errors="surrogatepass")).hexdigest()
