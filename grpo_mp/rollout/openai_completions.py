"""Requests and answers of OpenAI's completions: the prompt is a text or token ids, and one turn of an episode."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from grpo_mp.rollout.openai_requests import MODEL, NEUTRAL, RequestError, read_sampling, read_stop, usage
from grpo_mp.rollout.protocol import Policy, Turn

READ = ("model", "prompt", "max_tokens", "stop", "stream", "logprobs", "return_token_ids")
OF_TEXTS = ("seed", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p")
# As those of chat completions. Of each token its own logprob is known, and of no other.
COMPLETIONS_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **{name: NEUTRAL[name] for name in OF_TEXTS},
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True)
class CompletionRequest:
    """A request for one turn after a text or token ids. `token_ids`: the answer has those of prompt and turn."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    logprobs: bool
    token_ids: bool
    ignored: tuple[str, ...] = ()  # parameters that no turn here can follow

    async def answer(self, policy: Policy) -> Turn:
        """Generate the turn, whose text is all that it says: calls of tools are not taken out."""
        prompt: dict[str, Any] = {"text": self.prompt} if isinstance(self.prompt, str) else {"tokens": self.prompt}
        return await policy.generate(max_tokens=self.max_tokens, tools=(), stop=self.stop, **prompt)


def read_completion(body: Any, policy: Policy, ignores_sampling: bool = False) -> CompletionRequest:
    """Read the JSON of a request. Raises RequestError as `read_request` does."""
    ignored = read_sampling(body, policy, ignores_sampling, COMPLETIONS_NEUTRAL, READ)
    logprobs, bound = body.get("logprobs"), body.get("max_tokens")
    if not (logprobs is None or type(logprobs) in (int, bool)) or (logprobs is not None and logprobs < 0):
        raise RequestError("logprobs must be a whole number")
    if logprobs is not None and logprobs > 1 and not ignores_sampling:
        raise RequestError(f"logprobs={logprobs}: those of the sampled tokens are known, of no others: set 0 or 1")
    if bound is not None and (type(bound) is not int or bound < 1):
        raise RequestError("max_tokens must be a whole number from 1 on")
    return CompletionRequest(
        _read_prompt(body.get("prompt")),
        bound,
        read_stop(body.get("stop")),
        bool(body.get("stream")),
        logprobs is not None and logprobs is not False,
        bool(body.get("return_token_ids")),
        ignored,
    )


def text_completion(turn: Turn, before: Sequence[int], request: CompletionRequest, policy: Policy) -> dict[str, Any]:
    """Return a turn as a `text_completion`. `before`: the tokens that it was generated after."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": turn.text,
        "finish_reason": "stop" if turn.finished else "length",
        "logprobs": _logprobs(turn, policy) if request.logprobs else None,
    }
    if request.token_ids:
        choice |= {"prompt_token_ids": list(before), "token_ids": list(turn.tokens)}
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": usage(len(before), len(turn.tokens)),
    }


def as_text_stream(answer: Mapping[str, Any]) -> str:
    """Return a `text_completion` as server-sent events: one chunk with all of it."""
    return f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"


def _logprobs(turn: Turn, policy: Policy) -> dict[str, Any]:
    """Return the logprob of every sampled token, of the stop token and what a text of `stop` hid, too."""
    texts = [policy.decode([token]) for token in turn.tokens]
    *offsets, _ = accumulate(map(len, texts), initial=0)
    return {
        "tokens": texts,
        "token_logprobs": list(turn.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _read_prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise RequestError("prompt must be one text, or one list of token ids, and not empty")
