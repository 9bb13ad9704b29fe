"""Tools as users write them: whatever one does is told to the model, and the loop of the engine goes on."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout.protocol import ToolCall, ToolResult
from grpo_mp.rollout.tools import EpisodeTools, ToolKit, load_tools
from grpo_mp.utils.errors import UserError
from tests.episode_page import read_example
from tests.virtual_time import run_with_skips, skip

TOOLS = '''
import asyncio, os, signal, subprocess, sys, tempfile, time
from grpo_mp.rollout.protocol import BoundedTools

def die() -> None:
    """End the process."""
    os.kill(os.getpid(), signal.SIGKILL)

async def block() -> None:
    """Block the event loop."""
    open("block", "w").write("begins\\n")
    time.sleep(3600)

def start(detached: bool = False) -> None:
    print(subprocess.Popen(["sleep", "600"], start_new_session=detached).pid, file=open("pids", "a"), flush=True)

def leave() -> int:
    """Start processes that stay, of which one is in no group of its parent, and hang."""
    start()
    start(detached=True)
    open("leave", "w").write("begins\\n")
    time.sleep(3600)

def crash() -> int:
    """Start a process that stays, and crash."""
    start(detached=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def give(what: str) -> str:
    """
    Give back something.

    Args:
        what: its name
    """
    return {
        "bytes": b"a\\xffb",
        "megabyte": "x" * 2**20,
        "table": {"é": [1, None], 2: (0.1, float("inf"))},
        "surrogate": "\\ud800",
        "circle": (circle := []) or circle.append(circle) or circle,
    }[what]

def see() -> list:
    """List the variables that hold a secret."""
    return sorted(name for name, value in os.environ.items() if value == "secret")

def fail(how: str) -> str:
    """
    Fail.

    Args:
        how: by what
    """
    if how == "exit":
        os._exit(3)
    if how == "system_exit":
        sys.exit(1)
    return 1 / 0

class Counter:
    def __init__(self):
        self.loop = None

    def reset(self, start: int = 0, **columns) -> str:
        self.count = start
        return f" It begins at {start}."

    async def increase(self, by: int) -> int:
        """
        Increase the counter.

        Args:
            by: how much
        """
        assert self.loop in (None, asyncio.get_running_loop())
        self.loop = asyncio.get_running_loop()
        self.count += by
        return self.count

    def own_process(self) -> int:
        """Name this process."""
        return os.getpid()

    def hang(self) -> None:
        """Hang."""
        open("hang", "w").write("begins\\n")
        time.sleep(3600)

    def get_reward(self) -> float:
        return self.count

def add(a: int, b: int = 1) -> int:
    """
    Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def untyped(a):
    return a

WORD = "no tool"

class Slow(BoundedTools):
    parallel = 2

    def work(self, folder: str) -> str:
        """
        Say that it has begun, and wait until it may end.

        Args:
            folder: of the files that say so
        """
        began = time.monotonic()  # the same for all processes
        tempfile.mkstemp(dir=folder)
        while not os.path.exists(f"{folder}/may_end"):
            time.sleep(0.01)
        return f"{began} {time.monotonic()}"
'''
LIMIT_S = 600.0
NAMES = ("die", "block", "leave", "crash", "give", "fail", "add", "Counter")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tools") / "user_tools.py"
    path.write_text(TOOLS)
    return str(path)


def with_kit(
    file: str,
    work: Callable[[ToolKit], Awaitable[Any]],
    names: tuple[str, ...] = NAMES,
    processes: int = 2,
    **options: Any,
) -> Any:
    """Run a coroutine on tools of so many processes beside those of environments, which end with it."""

    async def run() -> Any:
        try:
            return await work(kit)
        finally:
            await kit.close()

    kit = load_tools([f"{file}:{name}" for name in names], processes, **options)
    return run_with_skips(run())


async def call(tools: EpisodeTools, name: str, **arguments: Any) -> ToolResult:
    return await tools.call(ToolCall(name, arguments))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a process has ended is told late on a busy machine."""
    monkeypatch.setattr("grpo_mp.rollout.tool_processes.ENDED_LIMIT_S", 60.0)


async def appear(file: Path, lines: int = 1) -> None:
    """Wait until a file has so many lines."""
    while not file.exists() or len(file.read_text().splitlines()) < lines:
        await asyncio.sleep(0.02)


def test_a_tool_that_dies_or_hangs_is_a_result_and_the_loop_goes_on(
    file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("die", "crash", "block", "leave")

    async def all_of_them(kit: ToolKit) -> tuple[list[ToolResult], str]:
        tools = await kit.open(LIMIT_S, 100)
        running = [asyncio.create_task(call(tools, name)) for name in names]
        await asyncio.wait(running[:2])
        await asyncio.gather(*(appear(tmp_path / name) for name in names[2:]), appear(tmp_path / "pids", 3))
        skip(LIMIT_S)
        results = await asyncio.gather(*running)
        after = await call(tools, "give", what="table")
        await tools.close()
        return results, after.text

    results, after = with_kit(file, all_of_them, processes=3)
    assert results == [
        ToolResult("Error: die ended its process, which ended by SIGKILL", "raised"),
        ToolResult("Error: crash ended its process, which ended by SIGSEGV", "raised"),
        *(ToolResult(f"Error: {name} took longer than {LIMIT_S:g} s", "timeout") for name in names[2:]),
    ]
    assert after == '{"é": [1, null], "2": [0.1, Infinity]}'
    assert all(map(has_ended, (tmp_path / "pids").read_text().split()))


def has_ended(pid: str) -> bool:
    deadline = time.monotonic() + 120.0  # what was killed ends when it next has a core
    status = Path("/proc", pid, "stat")
    while time.monotonic() < deadline:
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_results_and_errors_are_texts(file: str) -> None:
    cases: list[tuple[str, dict[str, Any], str, str | None]] = [
        ("add", {"a": 2}, "3", None),
        ("add", {"a": 1, "c": 2}, "Error: TypeError: add() got an unexpected keyword argument 'c'", "raised"),
        ("give", {"what": "bytes"}, "a\ufffdb", None),
        ("give", {"what": "megabyte"}, "x" * 100 + "... (1048476 characters left out)", None),
        ("give", {"what": "table"}, '{"é": [1, null], "2": [0.1, Infinity]}', None),
        ("give", {"what": "surrogate"}, "?", None),
        ("give", {"what": "circle"}, "Error: ValueError: Circular reference detected", "raised"),
        ("fail", {"how": "exit"}, "Error: fail ended its process, which ended with status 3", "raised"),
        ("fail", {"how": "system_exit"}, "Error: SystemExit: 1", "raised"),
        ("fail", {"how": "zero"}, "Error: ZeroDivisionError: division by zero", "raised"),
        ("minus", {}, "Error: there is no tool minus", "raised"),
        ("m" * 2**20, {}, "Error: there is no tool " + "m" * 76, "raised"),
    ]

    async def ask(kit: ToolKit) -> list[ToolResult]:
        tools = await kit.open(LIMIT_S, 100)
        unread = ToolCall("add", {}, error="the arguments of add are no JSON object")
        assert (await tools.call(unread)).text == "Error: the arguments of add are no JSON object"
        return [await tools.call(ToolCall(name, arguments)) for name, arguments, *_ in cases]

    names = ("give", "fail", "add")
    assert with_kit(file, ask, names) == [ToolResult(text, error) for *_, text, error in cases]


def test_an_environment_has_a_process_for_its_episode(file: str) -> None:
    async def episodes(kit: ToolKit) -> list[int]:
        first, second = [await kit.open(LIMIT_S, 100) for _ in range(2)]
        assert [await one.reset({"start": 3, "question": "?"}) for one in (first, second)] == [" It begins at 3."] * 2
        assert [(await call(first, "increase", by=2)).text for _ in range(2)] == ["5", "7"]
        assert (await call(second, "increase", by=1)).text == "4"
        assert [await first.reward(), await second.reward()] == [7.0, 4.0]
        processes = [int((await call(one, "own_process")).text) for one in (first, second)]
        await first.close()
        third = await kit.open(LIMIT_S, 100)  # in the process of the first, which has forgotten it
        processes.append(int((await call(third, "own_process")).text))
        assert "has no attribute 'count'" in (await call(third, "increase", by=1)).text
        await third.close()
        await second.close()
        return processes

    one, other, again = with_kit(file, episodes)
    assert len({os.getpid(), one, other}) == 3
    assert again == one


def test_a_hanging_environment_is_gone_and_functions_go_on(
    file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    async def episode(kit: ToolKit) -> None:
        tools = await kit.open(LIMIT_S, 200)
        await tools.reset({})
        hanging = asyncio.create_task(call(tools, "hang"))
        await appear(tmp_path / "hang")
        skip(LIMIT_S)
        assert (await hanging).error == "timeout"
        text = "Error: Counter.increase cannot be called: its process was ended with a call that took too long"
        assert await call(tools, "increase", by=1) == ToolResult(text, "raised")
        assert (await call(tools, "give", what="table")).error is None
        with pytest.raises(Exception, match=r"Counter\.get_reward cannot be called"):
            await tools.reward()
        await tools.close()

    with_kit(file, episode)


def test_tools_find_no_secret_of_the_run(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "GRPO_MP_ANYTHING", "SEARCH_KEY"):
        monkeypatch.setenv(name, "secret")

    async def look(kit: ToolKit) -> str:
        tools = await kit.open(LIMIT_S, 100)
        return (await call(tools, "see")).text

    assert with_kit(file, look, ("see",), variables=("SEARCH_KEY",)) == '["SEARCH_KEY"]'
    with pytest.raises(UserError, match=r"^rollout\.tool_environment: the run has no variable NOT_SET: set it$"):
        load_tools([f"{file}:see"], 1, variables=("SEARCH_KEY", "NOT_SET"))


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_example("Tools", tmp_path)
    (tmp_path / "notes.txt").write_text("a rose\na tree\nanother rose\n")
    monkeypatch.chdir(tmp_path)

    async def play(kit: ToolKit) -> None:
        tools = await kit.open(LIMIT_S, 100)
        await tools.reset({"question": "?"})
        assert await call(tools, "search", query="rose") == ToolResult('["a rose\\n", "another rose\\n"]')
        assert [(await call(tools, "note", line="x")).text for _ in range(2)] == ["1 lines", "2 lines"]
        await tools.close()

    names = tuple(path.partition(":")[2] for path in settings["rollout"]["tools"])
    with_kit(settings["rollout"]["tools"][0].partition(":")[0], play, names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["untyped"], "a tool needs type hints and a docstring with `Args:`"),
        (["WORD"], "a tool is a function or a class, not str"),
        (["add", "add"], "two tools have the name add: rename one"),
    ],
)
def test_what_is_no_tool_is_refused(file: str, names: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        load_tools([f"{file}:{name}" for name in names])
    assert message in str(refused.value)
    assert str(refused.value).startswith("rollout.tools")


def test_calls_of_bounded_tools_wait_for_each_other_beyond_their_limit(file: str, tmp_path: Path) -> None:
    """Those of all episodes, which have processes of their own."""

    async def many(kit: ToolKit) -> list[ToolResult]:
        opened = [await kit.open(1e6 if number < 2 else LIMIT_S, 1000) for number in range(5)]
        calls = [asyncio.create_task(call(tools, "work", folder=str(tmp_path))) for tools in opened]
        while len([*tmp_path.iterdir()]) < 2:
            await asyncio.sleep(0.02)
        skip(1000.0)  # longer than the limit of those that wait
        await asyncio.sleep(0.02)
        (tmp_path / "may_end").touch()
        results = await asyncio.gather(*calls)
        for tools in opened:
            await tools.close()
        return results

    results = with_kit(file, many, ("Slow",))
    assert {result.error for result in results} == {None}
    spans = [tuple(map(float, result.text.split())) for result in results]
    at_once = [sum(began <= moment < ended for began, ended in spans) for moment, _ in spans]
    assert max(at_once) == 2
