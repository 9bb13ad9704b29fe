"""Groups in flight follow the cache: of engines in virtual time, which preempt as SGLang does, lie, or talk junk."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from pydantic import ValidationError

from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.config.sections import EngineConfig, RolloutConfig
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.concurrency import QUEUE, EngineLoad, LaunchLimit, Limit, read_load
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask, RolloutWorker
from grpo_mp.utils.types import Prompt
from tests.rollout.fake_engine import NoScores
from tests.virtual_time import run_virtually

GROUPS = 96
SIZE = 4
LONGEST = 600
CACHE = 6000  # holds ten of the longest responses
STEP_S = 0.02
REQUEST_S = 0.0005  # time that a request adds to a step
REPLICA = {
    "timestamp": 7.0,
    "num_running_reqs": 5,
    "num_waiting_reqs": 2,
    "num_used_tokens": 300,
    "max_total_num_tokens": 1000,
    "max_running_requests": 64,
}


Shows = Callable[[EngineLoad], EngineLoad | None]  # what an engine says of its load


@dataclass(eq=False)
class Request:
    length: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: int = 0
    preemptions: int = 0


@dataclass
class CachedEngine:
    """Starts a waiting request if the cache holds what runs and `reserve` tokens more of each; preempts the shortest.

    A preempted request computes all its tokens again when it starts again, which takes as long as so many requests of a
    step. `shows`: changes what the engine says of its load.
    """

    reserve: int
    shows: Shows = lambda load: load
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    ended: int = 0
    preempted: int = 0
    preempted_before: list[int] = field(default_factory=lambda: [0])  # at the end of each step
    most_waiting: int = 0
    most_running: int = 0
    index: int = 0

    async def generate(self, prompt: Sequence[int], _: SamplingParams, count: int, *more: Any) -> list[EngineOutput]:
        draw = Random(f"{list(prompt)}")
        requests = [Request(min(LONGEST, 1 + int(draw.lognormvariate(3.5, 1.2)))) for _ in range(count)]
        self.waiting += requests
        for request in requests:
            await request.done.wait()
        self.ended += count
        self.preempted += sum(request.preemptions for request in requests)
        lengths = [request.length for request in requests]
        return [EngineOutput((1,) * n, (0.0,) * n, (0,) * n, truncated=False) for n in lengths]

    @property
    def used(self) -> int:
        return sum(request.tokens for request in self.running)

    async def run(self) -> None:
        while True:
            computed = 0
            while self.waiting and self._fits(self.waiting[0]):
                self.running.append(self.waiting.pop(0))
                computed += self.running[-1].tokens
            while self.used + len(self.running) > CACHE:
                shortest = min(self.running, key=lambda request: request.tokens)
                self.running.remove(shortest)
                shortest.preemptions += 1
                self.waiting.append(shortest)
            self.most_waiting = max(self.most_waiting, len(self.waiting))
            self.most_running = max(self.most_running, len(self.running))
            await asyncio.sleep(STEP_S + REQUEST_S * (len(self.running) + computed))
            for request in list(self.running):
                request.tokens += 1
                if request.tokens == request.length:
                    self.running.remove(request)
                    request.done.set()

    def _fits(self, request: Request) -> bool:
        return self.used + request.tokens + self.reserve * (len(self.running) + 1) <= CACHE

    async def load(self) -> EngineLoad | None:
        counts = (len(self.running), len(self.waiting), self.used)
        return self.shows(EngineLoad(*counts, CACHE, 10**6, 0.0, self.ended, self.preempted))

    async def abort_all(self) -> None:
        """Nothing is aborted."""


def generate(engine: CachedEngine, fixed: int | None, unknown: int = 16, steps: int = 1) -> tuple[float, LaunchLimit]:
    """Return the tokens per second of the last step, and the limit."""

    async def run() -> float:
        task = RolloutTask(lambda i: Prompt(i, "", (i,)), SIZE, 0, 1, SamplingParams(LONGEST))
        tokenizer: Any = SimpleNamespace(get_added_vocab=dict, batch_decode=lambda tokens, **_: [""] * len(tokens))
        parts: Any = (engine, NoScores(), tokenizer, math.inf, lambda error: None)
        loop = asyncio.get_running_loop()
        stepping = asyncio.create_task(engine.run())
        for step in range(steps):
            before_s = loop.time()
            stream = GroupStream(dist.HashStore(), str(step), AdmissionRule(GROUPS, GROUPS, GROUPS))
            groups: Any = await RolloutWorker(*parts, limit=limit).run(task, stream, GROUPS)
            assert sorted(groups) == list(range(GROUPS))
            engine.preempted_before.append(engine.preempted)
        stepping.cancel()
        tokens = sum(len(sample.tokens) for group in groups.values() for sample in group.samples)
        return float(tokens) / (loop.time() - before_s)

    limit = LaunchLimit(engine.load, LONGEST, fixed, unknown)
    return run_virtually(run()), limit


@pytest.mark.parametrize("reserve", [10, 40, 150])
def test_auto_is_as_fast_as_the_best_fixed_number_with_a_short_queue(reserve: int) -> None:
    """Of an engine that preempts many, some and no requests if all groups are launched at once."""
    speeds = {groups: generate(CachedEngine(reserve), groups)[0] for groups in (1, 2, 4, 8, 16, 32, 64, 96)}
    assert speeds[1] < 0.2 * max(speeds.values())
    engine = CachedEngine(reserve)
    speed, limit = generate(engine, None, steps=4)
    assert speed >= 0.95 * max(speeds.values())
    assert engine.most_waiting <= engine.most_running
    assert limit.take_metrics()["engine/waiting_requests"] <= QUEUE * engine.most_running


def test_preemptions_become_few() -> None:
    """The engine starts any number of requests at once, of which the cache does not hold a third."""
    engine = CachedEngine(reserve=0)
    generate(engine, None, steps=16)
    preempted = [after - before for before, after in pairwise(engine.preempted_before)]
    assert preempted[0] > 300
    assert sum(preempted[8:]) < 0.4 * 8 * preempted[0]


IDLE = EngineLoad(0, 0, 0, CACHE, 10**6, 0.0)
BUSY = EngineLoad(0, 10**9, 10**9, 0, 0, 0.0)
RANDOM = Random(0)


def anything(_: EngineLoad) -> EngineLoad | None:
    drawn = EngineLoad(*(RANDOM.choice([0, 1, 50, 10**12]) for _ in range(5)), at_s=0.0)  # type: ignore[misc]
    counted = replace(drawn, ended=RANDOM.randrange(10**6), preempted=RANDOM.randrange(10**6))
    return RANDOM.choice([None, counted])


@pytest.mark.parametrize("shows", [lambda _: IDLE, lambda _: BUSY, anything])
def test_an_engine_that_lies_gets_all_groups_nevertheless(shows: Shows) -> None:
    engine = CachedEngine(150, shows)
    generate(engine, None)
    assert engine.ended == GROUPS * SIZE


def test_a_busy_engine_gets_one_group_at_a_time() -> None:
    engine = CachedEngine(150, lambda _: BUSY)
    generate(engine, None)
    assert engine.most_running == SIZE


def test_an_engine_that_does_not_tell_its_load_gets_the_number_for_that_case() -> None:
    engine = CachedEngine(0, lambda _: None)
    _, limit = generate(engine, None, unknown=7)
    assert engine.most_running == 7 * SIZE
    assert limit.take_metrics() == {}


def test_a_fixed_number_is_kept_whatever_the_load() -> None:
    for shows in (lambda load: load, lambda _: None, lambda _: BUSY):
        engine = CachedEngine(0, shows)
        generate(engine, 5, unknown=7)
        assert engine.most_running == 5 * SIZE


def test_metrics_are_means_of_the_looks_and_preemptions_since_the_last() -> None:
    loads = [EngineLoad(8, 2, 500, 1000, 64, 0.0, 0, 3), EngineLoad(8, 4, 700, 1000, 64, 0.0, 0, 5)]

    async def load() -> EngineLoad:
        return loads.pop(0)

    limit = LaunchLimit(load, LONGEST, None, 1)
    for in_flight, preempted in ((2, 3.0), (5, 2.0)):
        asyncio.run(limit.look(in_flight, SIZE))
        assert limit.take_metrics() == {
            "engine/groups_in_flight": in_flight,
            "engine/waiting_requests": 2.0 if in_flight == 2 else 4.0,
            "engine/cache_use": 0.5 if in_flight == 2 else 0.7,
            "engine/preemptions": preempted,
        }
        assert limit.take_metrics() == {}


def load_of(running: int, waiting: int = 0, tokens: int = 6000, most: int = 10**6, **counts: int) -> EngineLoad:
    return EngineLoad(running, waiting, 0, tokens, most, 0.0, **counts)


@pytest.mark.parametrize(
    ("load", "limit", "in_flight", "groups"),
    [
        (load_of(0), Limit(), 0, 2),  # ten samples of 600 tokens surely fit
        (load_of(0, tokens=12000), Limit(), 0, 5),
        (load_of(0, tokens=12000, most=13), Limit(), 0, 3),
        (load_of(0, tokens=0), Limit(), 0, 2),
        (load_of(10, 4), Limit(), 7, 8),  # a group waits: another one may
        (load_of(10, 5), Limit(), 7, 7),
        (load_of(0), Limit(most_running=22), 0, 5),  # as many as before
        (load_of(1), Limit(most_running=22), 1, 3),
        (load_of(0), Limit(12.0, most_running=22), 0, 3),
        (load_of(40), Limit(), 12, 12 + 10),  # it has started all: as many again
        (load_of(40, 1), Limit(), 12, 12 + 2),  # up to ten may wait
        (load_of(40, 7), Limit(), 12, 12),
        (load_of(40, 30), Limit(), 12, 12 - 5),
        (load_of(40), Limit(requests=50.0), 12, 12 + 2),
        (load_of(40), Limit(requests=20.0), 12, 12 - 5),
        (load_of(1000, 1000), Limit(), 3, 1),
    ],
)
def test_room_of_the_cache_and_of_the_queue(load: EngineLoad, limit: Limit, in_flight: int, groups: int) -> None:
    assert limit.groups(load, in_flight, SIZE, LONGEST) == groups


def test_the_limit_falls_by_a_fifth_and_rises_by_a_group_for_each_turnover() -> None:
    limit = Limit().after(load_of(100), SIZE)
    assert limit.requests == math.inf
    assert limit.after(load_of(90, ended=5, preempted=2), SIZE).requests == math.inf  # two of a hundred are few
    limit = limit.after(load_of(90, ended=5, preempted=3), SIZE)
    assert limit.requests == 80
    # Those begun before still report preemptions, until as many requests have ended as may run.
    for ended, preempted, requests in ((50, 40, 80), (85, 60, 84), (90, 61, 84), (95, 62, 67.2)):
        limit = limit.after(load_of(80, ended=ended, preempted=preempted), SIZE)
        assert limit.requests == pytest.approx(requests)
    # It rises no further where fewer run.
    for turnover in range(1, 4):
        limit = limit.after(load_of(10, ended=95 + 70 * turnover, preempted=62), SIZE)
    assert limit.requests == pytest.approx(67.2)
    assert Limit(requests=4.5).after(load_of(4, preempted=1), SIZE).requests == SIZE


def test_the_load_is_summed_over_replicas() -> None:
    other = REPLICA | {"timestamp": 8.0, "num_running_reqs": 1}
    assert read_load({"loads": [REPLICA, other]}) == EngineLoad(6, 4, 600, 2000, 128, 8.0)


@pytest.mark.parametrize(
    "reply",
    [
        *(None, "", "[]", [], 3, {}, {"loads": None}, {"loads": []}, {"loads": [3]}, {"loads": [{}]}),
        *({"loads": [REPLICA | {name: None}]} for name in REPLICA),
        {"loads": [REPLICA, REPLICA | {"num_running_reqs": -1}]},
        {"loads": [REPLICA | {"num_used_tokens": math.nan}]},
        {"loads": [REPLICA | {"max_total_num_tokens": math.inf}]},
        {"loads": [REPLICA | {"num_waiting_reqs": "many"}]},
    ],
)
def test_junk_is_no_load(reply: Any) -> None:
    assert read_load(reply) is None


def client_of(answer: Callable[[httpx.Request], httpx.Response]) -> EngineClient:
    client = EngineClient(0, "http://127.0.0.1:1", {}, 60.0)
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://engine")
    return client


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(500, text="broken"),
        httpx.Response(200, text="{", headers={"content-type": "application/json"}),
        httpx.Response(200, content=b"\xff", headers={"content-type": "application/json"}),
        httpx.ReadTimeout("slow"),
        httpx.ConnectError("gone"),
    ],
)
def test_a_client_gets_no_load_of_a_dead_engine(reply: httpx.Response | Exception) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(reply, Exception):
            raise reply
        return reply

    assert asyncio.run(client_of(answer).load()) is None


def test_requests_that_the_engine_has_not_received_count_as_waiting() -> None:
    began = asyncio.Event()
    reported_s = [0.0]

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/loads":
            return httpx.Response(200, json={"loads": [REPLICA | {"timestamp": reported_s[0]}]})
        await began.wait()
        return httpx.Response(200, json=[{"meta_info": {"num_retractions": number}} for number in (0, 2, 1)])

    async def run() -> None:
        client = client_of(answer)  # type: ignore[arg-type]
        generation = asyncio.create_task(client._generate({}, 3))
        await asyncio.sleep(0)
        for age_s, waiting in ((-1.0, 2 + 3), (0.1, 2 + 3), (1.0, 2)):
            reported_s[0] = time.time() + age_s
            load = await client.load()
            assert load
            assert (load.waiting, load.ended, load.preempted) == (waiting, 0, 0)
        client._pauses += 1  # a pause of the run preempts each request once
        began.set()
        await generation
        load = await client.load()
        assert load
        assert (load.ended, load.preempted) == (3, 1)
        client._running.clear()
        generation = asyncio.create_task(client._generate({}, 3))
        await asyncio.sleep(0)
        load = await client.load()
        assert load
        assert load.waiting == 2 + 3
        client._running.set()
        await generation

    asyncio.run(run())


def test_the_load_of_a_real_engine(ask: Callable[[Callable[[EngineClient], Any]], Any]) -> None:
    async def run(client: EngineClient) -> list[EngineLoad | None]:
        generation = asyncio.create_task(client.generate([5, 6, 7], SamplingParams(100, ignore_eos=True), 6))
        loads = [await client.load()]
        while not generation.done():
            await asyncio.sleep(0.05)
            loads.append(await client.load())
        return loads

    loads = [load for load in ask(run) if load]
    assert max(load.running for load in loads) == 6
    assert {load.waiting for load in loads} >= {0}
    assert 6 * 50 < max(load.cached_tokens for load in loads) < 6 * 103 + 10
    assert loads[-1].ended == 6
    assert loads[-1].preempted == 0
    assert (loads[-1].max_tokens, loads[-1].max_running) == (128 * 168, 128)


def test_the_setting() -> None:
    sizes = {"group_size": 2, "max_prompt_tokens": 1, "max_response_tokens": 1}
    few, many = (
        RolloutConfig.model_validate(sizes | {"prompts_per_step": prompts, "max_staleness": 2}) for prompts in (8, 100)
    )
    assert EngineConfig().concurrent_groups == "auto"
    assert (EngineConfig().most_groups(few), EngineConfig().most_groups(many)) == (64, 300)
    assert EngineConfig(concurrent_groups=5).most_groups(many) == 5
    for wrong in (0, -1, "many", 1.5):
        with pytest.raises(ValidationError):
            EngineConfig.model_validate({"concurrent_groups": wrong})
