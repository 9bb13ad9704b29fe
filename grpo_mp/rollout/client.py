"""HTTP client of one SGLang server: generation, weight updates, memory and health."""

import asyncio
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from grpo_mp.config.sections import PauseMode
from grpo_mp.config.truncation import MAX_KEPT, TopP, truncation_of
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rollout.concurrency import EngineLoad, read_load
from grpo_mp.rollout.routed_experts import read_choices
from grpo_mp.utils.errors import EngineError, EngineTimeout, UserError
from grpo_mp.utils.types import ExpertIds, KeptTokens

LOGGER = logging.getLogger(__name__)
MESSAGE_CHARACTERS = 500
# SGLang closes a connection that was idle for 5 s, and a request sent at that moment is lost: close it earlier.
IDLE_LIMIT_S = 2.0
LAST_OF_CONNECTION = {"Connection": "close"}  # header of requests whose failure makes the server close the connection
BUSY_LIMIT_S = 60.0  # time limit for an engine to become idle after its last response
BUSY_POLL_S = 0.1
LOAD_LIMIT_S = 5.0
STEP_S = 0.2  # after which an engine usually has received a request
HEALTH_LIMIT_S = 30.0  # SGLang's own time limit of a health check is 20 s
# SGLang's selector of the models that a request applies to, for an engine with a drafting layer.
TARGET = {"selector": "target"}
TARGET_AND_DRAFT = {"selector": "all"}
OUT_OF_MEMORY = "out of memory"  # part of torch's error message; such an error allows a restart of the engine


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `max_response_tokens` includes the stop token."""

    max_response_tokens: int
    temperature: float = 1.0
    top_p: TopP = 1.0  # as in the settings: a probability or a mapping of limits
    stop: tuple[str, ...] = ()  # stop strings; need an engine with a tokenizer
    ignore_eos: bool = False
    seeds: tuple[int, ...] = ()  # one seed for each response; (): the engine's own random generator
    with_kept: bool = False  # return the kept tokens, at most MAX_KEPT, and logprobs over them

    def up_to(self, tokens: int | None) -> "SamplingParams":
        """Return the parameters with the token limit lowered to `tokens`; None: unchanged."""
        return replace(self, max_response_tokens=min(self.max_response_tokens, tokens or self.max_response_tokens))

    def only(self, index: int) -> "SamplingParams":
        """Return the parameters with only the seed of response `index`."""
        return replace(self, seeds=self.seeds[index : index + 1])

    def for_part(self, *part: int | str) -> "SamplingParams":
        """Return the parameters with the seeds of one part of an episode. `part`: its name, such as a turn's number."""
        return replace(self, seeds=tuple(sampling_seed(seed, *part) for seed in self.seeds))

    def as_json(self, count: int) -> dict[str, Any] | list[dict[str, Any]]:
        """Return SGLang's `sampling_params` for `count` responses to one prompt: if `is_split`, one item for each."""
        if self.seeds:
            return [{"n": 1, "sampling_seed": seed, **self._shared()} for seed in self.seeds]
        return [{"n": 1, **self._shared()}] * count if self.is_split else {"n": count, **self._shared()}

    @property
    def is_split(self) -> bool:
        """Return whether each response is an item of the request.

        With `n`, SGLang gives all responses one seed, and computes their prompt first, by a request for 0 tokens
        with the same options, and such a request fails with kept tokens. `generate` sends one without options.
        """
        return bool(self.seeds) or self.with_kept

    def _shared(self) -> dict[str, Any]:
        truncation = truncation_of(self.top_p)
        return {
            "max_new_tokens": self.max_response_tokens,
            "temperature": self.temperature,
            "top_p": truncation.top_p,
            "top_k": truncation.top_k or (MAX_KEPT if self.with_kept else -1),
            "min_p": truncation.min_p,
            "stop": list(self.stop) or None,
            "ignore_eos": self.ignore_eos,
        }


def sampling_seed(*parts: int | str) -> int:
    """Return a 63-bit seed: a hash of `parts`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class EngineOutput:
    """One response of an engine.

    `logprobs`: log_softmax(logits / temperature) of the tokens, over the kept tokens with `SamplingParams.with_kept`,
    else over the full vocabulary.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]  # one for each token, since weights may be updated during a response
    truncated: bool  # the response reached max_response_tokens
    aborted: bool = False  # ended by `abort_all`; may have no tokens
    verify_steps: int = 0  # number of verify steps of speculative decoding
    cached_tokens: int = 0  # number of prompt tokens found in the radix cache
    # Routed experts as in Sample; a continued response lacks the tokens that the request skips (`routed_tokens`).
    routed_experts: ExpertIds | None = field(default=None, compare=False, repr=False)
    kept: KeptTokens | None = field(default=None, compare=False, repr=False)

    def has(self, tokens: int | None, step_tokens: int) -> bool:
        """Return whether the response is at most one decode step (`step_tokens`) short of `tokens`; False for None.

        The tokens of the last decode step are dropped from a paused response and drawn again.
        """
        return tokens is not None and len(self.tokens) >= tokens - step_tokens

    def without_last_step(self, step_tokens: int) -> "EngineOutput":
        """Return an aborted response without its last `step_tokens` tokens, the most that one decode step adds.

        SGLang does not check the tokens of an aborted step for a stop token: a resumed response could continue past
        its end.
        """
        kept = max(0, len(self.tokens) - step_tokens)
        experts = self.routed_experts
        dropped = len(self.tokens) - kept
        return replace(
            self,
            tokens=self.tokens[:kept],
            logprobs=self.logprobs[:kept],
            weight_versions=self.weight_versions[:kept],
            verify_steps=max(0, self.verify_steps - 1),
            routed_experts=None if experts is None else experts[: len(experts) - dropped],
            kept=self.kept and self.kept.first(kept),
        )


class EngineClient:
    """Client of one engine. Every call has a time limit; error messages name the engine, the path and the reply."""

    def __init__(self, index: int, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.index = index
        self._timeout_s = timeout_s
        self._running = asyncio.Event()  # cleared while generation is paused
        self._running.set()
        self._pauses = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_LIMIT_S)
        # Without trust_env=False the proxies of the environment would be used for loopback as well.
        self._http = httpx.AsyncClient(
            base_url=url, headers=dict(headers), timeout=timeout_s, limits=limits, trust_env=False
        )
        self._updated = TARGET  # selector of the models in the current weight update
        self._cache_key = "0"  # weight version: separates radix-cache prefixes of different weights
        self._sent = deque[float]()  # time.time() at each request that the engine has perhaps not received
        self._held = 0  # requests that wait for the end of a pause
        self._ended = 0
        self._preempted = 0

    async def aclose(self) -> None:
        """Close the connections; requests that wait for the end of a pause then fail."""
        await self._http.aclose()
        self._running.set()

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        count: int = 1,
        routing: ModelShape | None = None,
        routed_tokens: int = 0,
    ) -> list[EngineOutput]:
        """Draw `count` responses to one prompt.

        `routing`: see `recorded_shape`, to also return the choices for each token; `routed_tokens`: number of
        leading tokens to return no choices for. The request waits while generation is paused. Cancelling the call
        ends its responses in the engine within seconds.
        """
        if sampling.is_split and count > 1:  # compute the prompt once, as SGLang does for `n`
            prompt = {"input_ids": list(prompt_tokens), "sampling_params": {"max_new_tokens": 0}}
            await self._generate(prompt, 1)
        body = {
            "input_ids": [list(prompt_tokens)] * count if sampling.is_split else list(prompt_tokens),
            "sampling_params": sampling.as_json(count),
            "return_logprob": True,
            "return_sampling_mask": sampling.with_kept,
            "return_routed_experts": routing is not None,
            "return_indexer_topk": routing is not None and routing.indexer is not None,
            "routed_experts_start_len": routed_tokens,
        }
        reply = await self._generate(body, count)
        outputs = reply if isinstance(reply, list) else [reply]
        if len(outputs) != count:
            raise self._error("/generate", f"returned {len(outputs)} responses where {count} were asked for")
        return [self._parse_output(output, len(prompt_tokens), routing, routed_tokens) for output in outputs]

    async def check_routed_experts(self, routing: ModelShape) -> None:
        """Generate two tokens and check that the response contains their choices."""
        prompt = (1, 2, 3, *[1] * (routing.indexer.topk if routing.indexer else 0))
        (output,) = await self.generate(prompt, SamplingParams(max_response_tokens=2), routing=routing)
        if output.routed_experts is None:
            message = (
                "SGLang does not return the experts (with R3_keys: and keys) that it chooses, with this model and "
            )
            raise self._error("/generate", f"{message}these engine.args: set training.router_replay=R2 or none")

    async def parse_tool_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str
    ) -> tuple[str, list[tuple[str, str]]]:
        """Parse the tool calls of a text with SGLang's `parser`; return the remaining text and (name, JSON arguments).

        If the parser fails, return the whole text and no calls.
        """
        path = "/parse_function_call"
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        reply = await self._request("POST", path, body, headers=LAST_OF_CONNECTION)
        if reply.status_code == httpx.codes.INTERNAL_SERVER_ERROR:  # malformed text of the policy is no engine error
            LOGGER.info("engine %d: the parser %s fails at what the policy wrote: %.200r", self.index, parser, text)
            return text, []
        parsed = self._check_status(path, reply)
        calls = [(call["name"], call["parameters"]) for call in parsed["calls"] if call["name"]]
        return str(parsed["normal_text"]), calls

    async def score(self, token_lists: Sequence[Sequence[int]], replica: int | None = None) -> list[list[float]]:
        """Return the logprobs of the tokens of given sequences at temperature 1; entry i belongs to token i + 1.

        `replica`: the attention replica of the engine that computes them; None: all replicas in turn.
        """
        body = {
            "input_ids": [list(tokens) for tokens in token_lists],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "routed_dp_rank": replica,
        }
        reply = await self._call("POST", "/generate", body)
        return [[entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]] for output in reply]

    async def decode(
        self, token_lists: Sequence[Sequence[int]], count: int, replica: int | None = None
    ) -> list[EngineOutput]:
        """Continue sequences by their `count` most probable tokens, with logprobs at temperature 1."""
        body = {
            "input_ids": [list(tokens) for tokens in token_lists],
            "sampling_params": SamplingParams(count, temperature=0.0, ignore_eos=True).as_json(1),
            "return_logprob": True,
            "routed_dp_rank": replica,
        }
        reply = await self._generate(body, len(token_lists))
        return [self._parse_output(output, 0, None) for output in reply]

    async def flush_cache(self) -> None:
        """Empty the radix cache; the server refuses this while requests run."""
        await self._call("POST", "/flush_cache")

    async def flush_cache_when_idle(self, limit_s: float = BUSY_LIMIT_S) -> None:
        """Wait until no request runs and empty the radix cache. Raises EngineTimeout after `limit_s`.

        SGLang clears a batch only after it has sent the responses, so it may refuse a flush shortly after them.
        """
        deadline = time.monotonic() + limit_s
        while (reply := await self._request("POST", "/flush_cache")).status_code == httpx.codes.BAD_REQUEST:
            if time.monotonic() > deadline:
                message = f"requests still ran after {limit_s:g} s: {_error_message(_parse_body(reply)).strip()}"
                raise EngineTimeout(f"engine {self.index}: /flush_cache: {message}")
            await asyncio.sleep(BUSY_POLL_S)
        self._check_status("/flush_cache", reply)

    async def abort_all(self) -> None:
        """Abort all requests; each returns its tokens so far, marked `aborted`."""
        await self._call("POST", "/abort_request", {"abort_all": True})

    async def check_health(self) -> None:
        """Raise EngineError if the engine does not generate a token; a failure during a pause is ignored."""
        while True:
            pauses = self._pauses
            reply = await self._request("GET", "/health_generate", limit_s=HEALTH_LIMIT_S)
            was_paused = not self._running.is_set() or self._pauses > pauses
            if reply.status_code == httpx.codes.OK or not was_paused:
                break
        self._check_status("/health_generate", reply)

    async def load(self) -> EngineLoad | None:
        """Return the engine's load; None if it does not answer or answers anything else.

        SGLang reports after each step, before it receives what arrived in the meantime: requests since then count as
        waiting.
        """
        try:
            reply = await self._request("GET", "/v1/loads?include=core", limit_s=LOAD_LIMIT_S)
            reported = read_load(_parse_body(reply))
        except (EngineError, ValueError):
            return None
        if reported is None:
            return None
        while self._sent and self._sent[0] <= reported.at_s - STEP_S:
            self._sent.popleft()
        waiting = reported.waiting + len(self._sent) + self._held
        return replace(reported, waiting=waiting, ended=self._ended, preempted=self._preempted)

    async def pause_generation(self, mode: PauseMode) -> None:
        """Pause running and new requests. Mode `retract` frees their KV cache, `in_place` keeps it."""
        self._running.clear()
        self._pauses += 1
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Resume paused requests; retracted requests recompute their KV cache."""
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})
        self._running.set()

    async def begin_weight_update(self, with_draft: bool = False) -> None:
        """Begin a weight update. `with_draft`: also update the drafting layer."""
        self._updated = TARGET_AND_DRAFT if with_draft else TARGET
        await self._post("/begin_weight_update", self._updated)

    async def update_weights_from_tensor(self, payloads: Sequence[str], load_format: str | None = None) -> None:
        """Send one bucket of weights: a base64 payload for each of the engine's tensor-parallel ranks.

        SGLang ignores tensors with unknown names.
        """
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": False}
        await self._post("/update_weights_from_tensor", body | self._updated)

    async def end_weight_update(self, version: int, keep_cache: bool = False) -> None:
        """End the update and set the weight version. `keep_cache`: keep the KV cache for the paused requests.

        Requests sent later never read KV cache of the old weights.
        """
        self._cache_key = str(version)
        await self._post("/end_weight_update", {})
        if not keep_cache:
            await self.flush_cache()
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Wait until the engine is idle and free the device memory of `tags`: `weights`, `kv_cache`, `cuda_graph`.

        SGLang's scheduler would crash if a request still ran.
        """
        await self.flush_cache_when_idle()
        await self._call("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of `tags` again; the weights are undefined until the next weight sync."""
        await self._call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    def _parse_output(
        self, output: dict[str, Any], prompt_tokens: int, routing: ModelShape | None, routed_tokens: int = 0
    ) -> EngineOutput:
        meta = output["meta_info"]
        pairs = meta["output_token_logprobs"] or []
        tokens = tuple(entry[1] for entry in pairs)
        if list(tokens) != list(output["output_ids"]):
            raise self._error("/generate", "output_ids and output_token_logprobs name different tokens")
        reason = (meta["finish_reason"] or {}).get("type")
        computed = prompt_tokens + len(tokens) - 1
        logprobs = [entry[0] for entry in pairs]
        kept = None
        if "output_token_sampling_mask" in meta:
            logprobs = meta["output_token_sampling_logprobs"]
            kept = KeptTokens.of(meta["output_token_sampling_mask"])
            if not len(kept) == len(logprobs) == len(tokens):
                message = f"returned the kept tokens of {len(kept)} positions for {len(tokens)} tokens"
                raise self._error("/generate", message)
        return EngineOutput(
            tokens=tokens,
            logprobs=tuple(math.nan if logprob is None else logprob for logprob in logprobs),
            weight_versions=token_versions(meta, len(tokens)),
            truncated=reason == "length",
            aborted=reason == "abort",
            verify_steps=meta.get("spec_verify_ct", 0),
            cached_tokens=meta.get("cached_tokens", 0),
            routed_experts=read_choices(meta, computed, routing, routed_tokens) if routing else None,
            kept=kept,
        )

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        self._check_success(path, await self._call("POST", path, body))

    def _check_success(self, path: str, reply: Any) -> None:
        if not (isinstance(reply, dict) and reply.get("success") is True):
            raise self._error(path, _error_message(reply))

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._check_status(path, await self._request(method, path, body))

    async def _generate(self, body: dict[str, Any], count: int) -> Any:
        """Wait until generation is not paused and send a request for `count` responses with the weights' cache key."""
        try:
            async with asyncio.timeout(self._timeout_s):
                # A request that reached the engine during a pause would carry the cache key of the old weights.
                self._held += count
                try:
                    await self._running.wait()
                finally:
                    self._held -= count
                keyed = body | {"extra_key": self._cache_key}
                pauses = self._pauses
                self._sent.extend([time.time()] * count)
                reply = await self._request("POST", "/generate", keyed, math.inf)
        except TimeoutError as error:
            raise self._timeout("/generate", self._timeout_s) from error
        content = self._check_status("/generate", reply)
        self._ended += count
        for output in content if isinstance(content, list) else [content]:
            # A pause may preempt all requests once.
            preempted = output["meta_info"].get("num_retractions", 0) - (self._pauses - pauses)
            self._preempted += max(0, preempted)
        return content

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        limit_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        limit_s = limit_s or self._timeout_s
        if self._http.is_closed:
            raise EngineError(self._sentence(path, "the engine was lost"))
        try:
            return await self._http.request(method, path, json=body, timeout=limit_s, headers=headers)
        except httpx.TimeoutException as error:
            raise self._timeout(path, limit_s) from error
        except httpx.TransportError as error:
            message = f"the connection failed ({str(error) or type(error).__name__})"
            raise EngineError(self._sentence(path, message)) from error

    def _check_status(self, path: str, reply: httpx.Response) -> Any:
        content = _parse_body(reply)
        if reply.status_code != httpx.codes.OK:
            message = f"status {reply.status_code}: {_error_message(content)}"
            raise EngineError(self._sentence(path, message)) if reply.is_server_error else self._error(path, message)
        return content

    def _timeout(self, path: str, limit_s: float) -> EngineTimeout:
        return EngineTimeout(f"engine {self.index}: {path} did not answer within {limit_s:g} s")

    def _error(self, path: str, message: str) -> UserError:
        """Return a UserError, or the restartable EngineError if the engine ran out of memory."""
        kind = EngineError if OUT_OF_MEMORY in message.lower() else UserError
        return kind(self._sentence(path, message))

    def _sentence(self, path: str, message: str) -> str:
        return f"engine {self.index}: {path}: {message[:MESSAGE_CHARACTERS]}"


def token_versions(meta: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the weight version of each of `count` tokens.

    SGLang's `meta` (meta_info) has either one version or spans of tokens with a version each.
    """
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    versions = [
        0 if span["version"] == "default" else int(span["version"])  # default: weights that the engine loaded itself
        for span in spans
        for _ in range(span["start"], span["end"])
    ]
    if len(versions) != count:
        raise ValueError(f"weight versions of {len(versions)} tokens for {count} tokens")
    return tuple(versions)


def _parse_body(reply: httpx.Response) -> Any:
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    return reply.json() if is_json and reply.content else reply.text


def _error_message(content: Any) -> str:
    if isinstance(content, dict):
        message = content.get("message") or content.get("error") or content
        return str(message.get("message", message) if isinstance(message, dict) else message)
    return str(content) or "(no message)"
