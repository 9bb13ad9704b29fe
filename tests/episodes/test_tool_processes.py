"""Tools in processes of their own: whatever one does, the loop of the engine goes on, and the policy is told."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout.protocol import ToolCall, ToolResult
from grpo_mp.rollout.tools import EpisodeTools, RemoteTools, ToolKit, load_tools
from grpo_mp.utils.errors import UserError
from tests.virtual_time import run_with_skips, skip

TOOLS = '''
import asyncio, os, re, signal, subprocess, sys, time

def process() -> int:
    """Say which process this is."""
    print("no reply", flush=True)
    return os.getpid()

def die() -> None:
    """End the process."""
    os.kill(os.getpid(), signal.SIGKILL)

async def block() -> None:
    """Block the event loop."""
    open("block", "w").write("begins\\n")
    time.sleep(3600)

def match() -> bool:
    """Match for years, in one operation that lets no other thread run."""
    open("match", "w").write("begins\\n")
    return bool(re.match(r"(a|a)*$", "a" * 64 + "b"))

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
    if how == "read":
        return sys.stdin.read()
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
        """Say which process this is."""
        return os.getpid()

    def abandon(self) -> None:
        """Leave an orphan in a session of its own."""
        if not os.fork():
            start(detached=True)
            os._exit(0)
        os.wait()

    def hang(self) -> None:
        """Hang."""
        open("hang", "w").write("begins\\n")
        time.sleep(3600)

    def get_reward(self) -> float:
        return self.count
'''
LIMIT_S = 600.0
NAMES = ("process", "die", "block", "match", "leave", "crash", "give", "fail", "Counter")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tools") / "user_tools.py"
    path.write_text(TOOLS)
    return str(path)


def with_kit(
    file: str,
    work: Callable[[ToolKit], Awaitable[Any]],
    names: tuple[str, ...] = NAMES,
    processes: int | None = 2,
    variables: tuple[str, ...] = (),
) -> Any:
    """Run a coroutine on tools of so many processes beside those of environments, which end with it."""

    async def run() -> Any:
        try:
            return await work(kit)
        finally:
            await kit.close()

    kit = load_tools([f"{file}:{name}" for name in names], processes, variables=variables)
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
    file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("die", "crash", "block", "match", "leave")

    async def all_of_them(kit: ToolKit) -> tuple[list[ToolResult], str]:
        tools = await kit.open(LIMIT_S, 100, lambda: "step 1: prompt 4, sample 0, turn 2")
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
    where = "step 1: prompt 4, sample 0, turn 2: the tool"
    assert {record.getMessage() for record in caplog.records if record.levelname == "WARNING"} == {
        f"{where} die ended its process, which ended by SIGKILL",
        f"{where} crash ended its process, which ended by SIGSEGV",
        *(f"{where} {name} took longer than {LIMIT_S:g} s (rollout.limits.tool_s)" for name in names[2:]),
    }
    pids = (tmp_path / "pids").read_text().split()
    assert all(map(has_ended, pids))


def has_ended(pid: str) -> bool:
    deadline = time.monotonic() + 120.0  # what was killed ends when it next has a core
    status = Path("/proc", pid, "stat")
    while time.monotonic() < deadline:
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("processes", [None, 2])
def test_results_are_those_of_a_thread(file: str, processes: int | None) -> None:
    calls = [("give", what) for what in ("bytes", "megabyte", "table", "surrogate", "circle")]
    calls += [("fail", how) for how in ("exit", "zero")]

    async def ask(kit: ToolKit) -> list[ToolResult]:
        tools = await kit.open(LIMIT_S, 100)
        return [await tools.call(ToolCall(name, {"what" if name == "give" else "how": how})) for name, how in calls]

    results = with_kit(file, ask, ("give", "fail"), processes)
    assert [result.text for result in results] == [
        "a\ufffdb",
        "x" * 100 + "... (1048476 characters left out)",
        '{"é": [1, null], "2": [0.1, Infinity]}',
        "?",
        "Error: ValueError: Circular reference detected",
        "Error: ExitCallError: it called os._exit(3): return, or raise an error",
        "Error: ZeroDivisionError: division by zero",
    ]


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


def test_what_an_environment_leaves_ends_with_its_episode(
    file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    async def episodes(kit: ToolKit) -> None:
        tools = await kit.open(LIMIT_S, 100)
        assert (await call(tools, "abandon")).error is None
        own = (await call(tools, "own_process")).text
        await tools.close()
        assert all(map(has_ended, [own, *(tmp_path / "pids").read_text().split()]))
        another = await kit.open(LIMIT_S, 100)
        assert (await call(another, "own_process")).text != own
        await another.close()

    with_kit(file, episodes, ("Counter",))


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


def test_calls_of_functions_share_a_bounded_number_of_processes(file: str) -> None:
    async def many(kit: ToolKit) -> set[str]:
        tools = await kit.open(LIMIT_S, 100)
        results = await asyncio.gather(*(call(tools, "process") for _ in range(12)))
        assert {result.error for result in results} == {None}
        return {result.text for result in results}

    assert 1 <= len(with_kit(file, many, ("process",))) <= 2


def test_a_cancelled_call_ends_with_its_process(file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    async def cancelled(kit: ToolKit) -> bool:
        tools = await kit.open(LIMIT_S, 100)
        pid = (await call(tools, "own_process")).text
        hanging = asyncio.create_task(call(tools, "hang"))
        await appear(tmp_path / "hang")
        hanging.cancel()
        await asyncio.wait({hanging})
        await tools.close()
        return has_ended(pid)

    assert with_kit(file, cancelled, ("Counter",))


def test_tools_find_no_secret_of_the_run(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "GRPO_MP_ANYTHING", "SEARCH_KEY"):
        monkeypatch.setenv(name, "secret")

    async def look(kit: ToolKit) -> str:
        tools = await kit.open(LIMIT_S, 100)
        return (await call(tools, "see")).text

    assert with_kit(file, look, ("see",), variables=("SEARCH_KEY",)) == '["SEARCH_KEY"]'
    with pytest.raises(UserError, match=r"^rollout\.tool_environment: the run has no variable NOT_SET: set it$"):
        load_tools([f"{file}:see"], 1, variables=("SEARCH_KEY", "NOT_SET"))


def test_no_process_is_started_before_the_tools_are_checked(file: str, tmp_path: Path) -> None:
    only_here = tmp_path / "only_here.py"
    check = f'import os\nif os.getpid() != {os.getpid()}:\n    raise OSError("no second process")\n'
    only_here.write_text(check + TOOLS)
    with pytest.raises(
        UserError, match=r"rollout\.tool_process: .*importing .*only_here\.py failed: OSError: no second"
    ):
        load_tools([f"{only_here}:give"], processes=1)
    assert not isinstance(load_tools([f"{only_here}:give"]).calls, RemoteTools)
