"""Every call against a real server; logprobs against transformers."""

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_mp.config.truncation import TopP, truncation_of
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.shared_memory import LOADER, TensorSpec, export_to_host
from grpo_mp.utils.errors import EngineError, PhaseTimeout, UserError
from grpo_mp.utils.types import NO_TOKEN
from grpo_mp.weight_sync.transport import serialize
from tests.http_server import JsonServer, Reply

TOLERANCE = 1e-4
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LONG = SamplingParams(max_response_tokens=16, ignore_eos=True)
Ask = Callable[..., Any]
Logprobs = Callable[..., torch.Tensor]


def greatest_difference(responses: Sequence[EngineOutput], expected: Callable[[list[int]], torch.Tensor]) -> float:
    worst = 0.0
    for response in responses:
        table = expected([*PROMPT, *response.tokens])[len(PROMPT) - 1 : -1]
        reference = table.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        worst = max(worst, (reference - torch.tensor(response.logprobs)).abs().max().item())
    return worst


def weights_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(folder / "model.safetensors").items())


async def send_weights(client: EngineClient, folder: Path, version: int) -> None:
    await client.begin_weight_update()
    await load_weights(client, folder)
    await client.end_weight_update(version)


async def load_weights(client: EngineClient, folder: Path) -> None:
    weights = weights_of(folder)
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
    with export_to_host(weights, specs) as export:
        await client.update_weights_from_tensor([serialize([export])], load_format=LOADER)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.4, 0.7)])
def test_logprobs_are_of_the_scaled_untruncated_distribution(
    ask: Ask, model_folder: Path, expected_logprobs: Logprobs, temperature: float, top_p: float
) -> None:
    sampling = SamplingParams(16, temperature, top_p, ignore_eos=True)
    group = ask(lambda client: client.generate(PROMPT, sampling, 6))
    assert greatest_difference(group, lambda t: expected_logprobs(model_folder, t, temperature)) < TOLERANCE


TRUNCATED = [{"top_p": 0.9, "top_k": 20, "min_p": 0.05}, {"top_k": 3}, {"min_p": 0.3}, 0.5]


@pytest.mark.parametrize("top_p", TRUNCATED)
def test_kept_tokens_and_logprobs_over_them_are_those_of_the_rule(
    ask: Ask, model_folder: Path, expected_logprobs: Logprobs, top_p: TopP
) -> None:
    """At most k tokens, until those before have the mass p, at least a share min_p of the most likely; in float64."""
    sampling = SamplingParams(16, 0.6, top_p, ignore_eos=True, with_kept=True)
    limits = truncation_of(top_p)
    worst = 0.0
    sizes = set[int]()
    for response in ask(lambda client: client.generate(PROMPT, sampling, 6)):
        tables = expected_logprobs(model_folder, [*PROMPT, *response.tokens], 0.6)[len(PROMPT) - 1 : -1].double().exp()
        kept = response.kept.padded(int(response.kept.counts.max()))
        for p, token, logprob, ids in zip(tables, response.tokens, response.logprobs, kept, strict=True):
            ordered = p.sort(descending=True)
            inside = ordered.values.cumsum(0) - ordered.values <= limits.top_p
            inside &= torch.arange(len(p)) < (limits.top_k or len(p))
            inside &= ordered.values >= limits.min_p * ordered.values[0]
            expected = set(ordered.indices[inside].tolist())
            assert token in expected
            assert {*ids.tolist()} - {NO_TOKEN} == expected
            worst = max(worst, abs(float((p[token] / ordered.values[inside].sum()).log()) - logprob))
            sizes.add(len(expected))
    assert worst < 1e-5
    assert max(sizes) < len(p)  # tokens were cut off


@pytest.mark.parametrize("options", [{}, {"seeds": tuple(range(8))}, {"with_kept": True, "top_p": 0.9}])
def test_a_group_shares_its_prompt_and_differs_in_its_responses(ask: Ask, options: dict[str, Any]) -> None:
    prompt = [len(options) + 3, *PROMPT]  # no other case left it in the cache
    group = ask(lambda client: client.generate(prompt, replace(LONG, **options), 8))
    assert len({response.tokens for response in group}) == 8
    assert all(len(response.tokens) == len(response.logprobs) == 16 for response in group)
    assert all(response.cached_tokens == len(prompt) - 1 for response in group)


def test_score_gives_the_logprob_of_every_token_but_the_first(
    ask: Ask, model_folder: Path, expected_logprobs: Logprobs
) -> None:
    sequences = [[4, 5, 6, 7, 8], list(range(20, 60)), [4, 5, 6, 9]]
    for _ in range(2):  # a second time the prefixes are known to the engine
        scores = ask(lambda client: client.score(sequences))
        for tokens, logprobs in zip(sequences, scores, strict=True):
            reference = expected_logprobs(model_folder, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), reference, atol=TOLERANCE, rtol=0)


def test_decoding_continues_by_the_most_probable_tokens(
    ask: Ask, model_folder: Path, expected_logprobs: Logprobs
) -> None:
    sequences = [[4, 5, 6, 7, 8], list(range(20, 60)), [4, 5]]
    for tokens, output in zip(sequences, ask(lambda client: client.decode(sequences, 6)), strict=True):
        best = expected_logprobs(model_folder, [*tokens, *output.tokens])[len(tokens) - 1 : -1].max(1)
        assert best.indices.tolist() == list(output.tokens)
        torch.testing.assert_close(torch.tensor(output.logprobs), best.values, atol=TOLERANCE, rtol=0)


def generate_while(
    ask: Ask,
    action: Callable[[EngineClient], Awaitable[None]],
    is_interrupted: Callable[[list[EngineOutput]], bool],
    routing: ModelShape | None = None,
) -> list[EngineOutput]:
    """Return the responses of a request that `action` interrupted, with the first delay after which it does."""

    async def generate(client: EngineClient, delay_s: float) -> list[EngineOutput]:
        request = asyncio.create_task(client.generate(PROMPT, SamplingParams(140, ignore_eos=True), 4, routing))
        await asyncio.sleep(delay_s)
        await action(client)
        return await request

    for delay_s in (0.1, 0.2, 0.4, 0.05, 0.8, 1.6, 3.2, 0.3, 6.4):  # the last ones for a busy machine
        group: list[EngineOutput] = ask(lambda client, delay_s=delay_s: generate(client, delay_s))
        if is_interrupted(group):
            return group
    raise AssertionError("the call never came while the request was running")


def test_tokens_before_and_after_an_update_have_their_weight_version(ask: Ask, model_folder: Path) -> None:
    versions = itertools.count(50)

    async def update(client: EngineClient) -> None:
        await client._call("POST", "/pause_generation", {"mode": "retract"})
        await send_weights(client, model_folder, next(versions))
        await client._call("POST", "/continue_generation", {})

    ask(lambda client: send_weights(client, model_folder, next(versions)))
    group = generate_while(ask, update, lambda group: all(len(set(one.weight_versions)) == 2 for one in group))
    last = next(versions) - 1
    for response in group:
        assert set(response.weight_versions) == {last - 1, last}
        assert list(response.weight_versions) == sorted(response.weight_versions)


def test_engine_works_after_releasing_and_resuming_memory(
    ask: Ask, model_folder: Path, expected_logprobs: Logprobs
) -> None:
    async def sleep_and_wake(client: EngineClient) -> list[EngineOutput]:
        await client.release_memory(["kv_cache", "weights"])
        await client.resume_memory(["weights", "kv_cache"])
        return await client.generate(PROMPT, LONG, 1)

    assert greatest_difference(ask(sleep_and_wake), lambda t: expected_logprobs(model_folder, t)) < TOLERANCE


def test_calls_that_no_parser_takes_leave_the_engine_there_and_unknown_tools_are_named(ask: Ask) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}]
    broken = ("null", "[1]", '{"name": ["add"]}')

    async def parse(client: EngineClient) -> list[tuple[str, list[tuple[str, str]]]]:
        texts = [f"<tool_call>\n{call}\n</tool_call>" for call in (*broken, '{"name": "sub", "arguments": {"a": 1}}')]
        return [await client.parse_tool_calls(text, tools, "qwen25") for text in texts]

    *failed, (_, unknown) = ask(parse)
    assert failed == [(f"<tool_call>\n{call}\n</tool_call>", []) for call in broken]
    assert unknown == [("sub", '{"a": 1}')]


def test_errors_name_engine_path_and_reason(ask: Ask, model_folder: Path) -> None:
    with pytest.raises(UserError, match=r"engine 3: /generate: .*longer than the model's context"):
        ask(lambda client: client.generate([5] * 400, LONG))
    with pytest.raises(UserError, match=r"engine 3: /update_weights_from_tensor: .*begin_weight_update"):
        ask(lambda client: load_weights(client, model_folder))


def test_a_request_without_the_key_is_refused(engine: EngineProcess) -> None:
    async def request_without_key() -> None:
        async with aclosing(EngineClient(3, engine.url, {}, 60.0)) as client:
            await client.abort_all()

    with pytest.raises(UserError, match="status 401"):
        asyncio.run(request_without_key())


def test_silent_server_times_out_and_gone_server_raises() -> None:
    async def wait(port: int, limit_s: float) -> None:
        async with aclosing(EngineClient(0, f"http://127.0.0.1:{port}", {}, limit_s)) as client:
            await client.abort_all()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(PhaseTimeout, match=r"engine 0: /abort_request did not answer within 0.2 s"):
            asyncio.run(wait(port, 0.2))
    with pytest.raises(UserError, match=r"engine 0: /abort_request: the connection failed"):
        asyncio.run(wait(port, 60.0))


def test_requests_to_an_engine_that_was_lost_say_so() -> None:
    """Its client is closed while a worker still has it."""

    async def ask_after_loss() -> None:
        client = EngineClient(7, "http://127.0.0.1:1", {}, timeout_s=1.0)
        await client.aclose()
        await client.generate([1], LONG)

    with pytest.raises(EngineError, match=r"^engine 7: /generate: the engine was lost$"):
        asyncio.run(ask_after_loss())


class BrokenEngine(JsonServer):
    """It answers every route with one failure."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__()
        self.reply = status, json.dumps({"success": False, "message": message})

    def answer(self, *_: Any) -> Reply:
        return self.reply


@pytest.mark.parametrize(
    ("status", "message", "restarts"),
    [
        (500, "CUDA out of memory. Tried to allocate 2 GiB", True),
        (200, "torch.OutOfMemoryError: CUDA out of memory.", True),
        (400, "no parameter model.x", False),
    ],
)
def test_an_engine_without_memory_may_start_again(status: int, message: str, restarts: bool) -> None:
    """In the weight sync, and when it wakes; what the trainer did wrong ends the run."""

    async def call(url: str, waking: bool) -> None:
        async with aclosing(EngineClient(4, url, {}, 60.0)) as client:
            await (client.resume_memory(["weights"]) if waking else client.update_weights_from_tensor(["x"]))

    with BrokenEngine(status, message).serving() as server:
        for waking in (False, True)[: 1 + (status != 200)]:
            with pytest.raises(UserError, match=rf"^engine 4: /\w+: .*{re.escape(message)}") as raised:
                asyncio.run(call(server.url, waking))
            assert isinstance(raised.value, EngineError) == restarts


def test_memory_is_released_as_soon_as_the_last_request_is_done(ask: Ask) -> None:
    """A request in flight is waited for; SGLang's scheduler asserts that there is none, and would end."""

    async def flush_often(client: EngineClient) -> None:
        for _ in range(600):  # until the request has reached the scheduler
            await asyncio.sleep(0.02)
            await client.flush_cache()

    async def release_while_busy(client: EngineClient) -> list[EngineOutput]:
        await client.flush_cache_when_idle()  # SGLang may still clear the batch of the test before
        generating = asyncio.create_task(client.generate(PROMPT, SamplingParams(128, ignore_eos=True), 8))
        with pytest.raises(UserError, match="status 400"):
            await flush_often(client)
        with pytest.raises(PhaseTimeout, match=r"^engine 3: /flush_cache: requests still ran after 0 s: "):
            await client.flush_cache_when_idle(limit_s=0)
        await client.release_memory(["kv_cache"])
        assert generating.done()
        await client.resume_memory(["kv_cache"])
        return await generating

    assert [len(response.tokens) for response in ask(release_while_busy)] == [128] * 8


def test_a_cache_that_is_kept_is_not_read_by_new_weights(
    engine: EngineProcess, ask: Ask, model_folder: Path, other_folder: Path, expected_logprobs: Logprobs
) -> None:
    """The same prompt again: its prefix is taken from the cache until the weights change."""
    during = list[EngineOutput]()

    async def update(client: EngineClient, folder: Path, version: int) -> None:
        await client.pause_generation("in_place")
        waits = asyncio.create_task(client.generate(PROMPT, LONG))
        await asyncio.sleep(0)  # it is asked for, before the weights change
        await client.begin_weight_update()
        await load_weights(client, folder)
        await client.end_weight_update(version, keep_cache=True)
        await client.continue_generation()
        during.extend(await waits)

    async def run(client: EngineClient) -> list[EngineOutput]:
        await client.flush_cache_when_idle()
        outputs = [output for _ in range(2) for output in await client.generate(PROMPT, LONG)]
        await update(client, other_folder, 41)
        outputs += [output for _ in range(2) for output in await client.generate(PROMPT, LONG)]
        await update(client, model_folder, 0)
        await client.flush_cache_when_idle()
        return outputs

    outputs = ask(run)
    assert [bool(output.cached_tokens) for output in outputs] == [False, True, True, True]
    assert not during[0].cached_tokens  # it came when the old weights were still there
    assert greatest_difference(outputs[:2], lambda tokens: expected_logprobs(model_folder, tokens)) < TOLERANCE
    assert greatest_difference(outputs[2:], lambda tokens: expected_logprobs(other_folder, tokens)) < TOLERANCE
    assert greatest_difference(during[:1], lambda tokens: expected_logprobs(other_folder, tokens)) < TOLERANCE
    assert {version for output in during[:1] for version in output.weight_versions} == {41}


def test_an_engine_that_is_well_says_so(ask: Ask) -> None:
    """Also while it is paused for a moment: it is asked again then."""

    async def pause_meanwhile(client: EngineClient) -> None:
        await client.pause_generation("in_place")
        health = asyncio.create_task(client.check_health())
        await client._call("GET", "/server_info")  # after the question
        await client.continue_generation()
        await health

    ask(lambda client: client.check_health())
    ask(pause_meanwhile)
