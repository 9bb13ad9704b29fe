"""Tools as users write them: what a bad one does is told to the model, and ends in time."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.rollout.protocol import ToolCall, ToolResult
from grpo_mp.rollout.tools import MOST_HANGING, EpisodeTools, ToolKit, ToolThreads, load_tools
from grpo_mp.utils.errors import UserError
from tests.episode_page import read_example
from tests.virtual_time import run_with_skips, skip

TOOLS = '''
import asyncio, concurrent.futures, os, tempfile, time
from grpo_mp.rollout.protocol import BoundedTools

def add(a: int, b: int = 1) -> int:
    """
    Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

async def slow_add(a: int) -> int:
    """
    Add one, later.

    Args:
        a: a number
    """
    await asyncio.sleep(a)
    return a + 1

async def ends_all(status: int) -> str:
    """
    End the process.

    Args:
        status: its status
    """
    raise SystemExit(status)

async def leaves(status: int) -> str:
    """
    End the process at once, after others had their turn.

    Args:
        status: its status
    """
    await asyncio.sleep(0)
    await asyncio.create_task(leave(status))

async def leave(status):
    await asyncio.sleep(0)
    os._exit(status)

def bad(how: str) -> str:
    """
    Do something bad.

    Args:
        how: what to do
    """
    return {
        "hang": lambda: time.sleep(3600),
        "exit": lambda: os._exit(3),
        "raise": lambda: 1 / 0,
        "system_exit": lambda: exit(1),
        "bytes": lambda: b"a\\xff\\xfeb",
        "megabyte": lambda: "x" * 2**20,
        "table": lambda: {"é": [1, None]},
    }[how]()

def late(file: str) -> str:
    """
    Wait for a file.

    Args:
        file: which
    """
    while not os.path.exists(file):
        time.sleep(0.01)
    return "late"

def untyped(a):
    return a

class Counter:
    def __init__(self):
        self.count = 0

    def reset(self, start: int = 0, **columns) -> str:
        self.count = start
        return f" It begins at {start}."

    def increase(self, by: int) -> int:
        """
        Increase the counter.

        Args:
            by: how much
        """
        self.count += by
        return self.count

class Graded:
    looked = 0

    def __init__(self):
        self.grade = lambda: 1.0

    @property
    def state(self):
        type(self).looked += 1
        return print

    def get_reward(self) -> float:
        return 0.25

    def look(self) -> int:
        """Look around."""
        return self.looked

def make_counter(by: int = 7) -> Counter:
    counter = Counter()
    counter.by = by
    return counter

def nothing():
    raise LookupError("no such game")

WORD = "no tool"

async def cancels(how: str) -> str:
    """
    End by a cancellation that nobody asked for.

    Args:
        how: of what
    """
    task = asyncio.current_task() if how == "own" else asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    return await (asyncio.sleep(60) if how == "own" else task)

def cancels_in_thread() -> str:
    """End by the cancellation of a future."""
    future = concurrent.futures.Future()
    future.cancel()
    return future.result()

def half(raises: bool) -> str:
    """
    Say half a character.

    Args:
        raises: as an error
    """
    if raises:
        raise ValueError("\\udcff")
    return "\\udcff"

async def waits(file: str) -> None:
    """
    Wait, and tell of the end.

    Args:
        file: where
    """
    try:
        open(file, "w").write("began")
        await asyncio.sleep(3600)
    finally:
        open(file, "w").write("ended")

class Slow(BoundedTools):
    parallel, timeout_s = 2, 2.5

    def work(self, folder: str) -> str:
        """
        Say that it has begun, and wait until it may end.

        Args:
            folder: of the files that say so
        """
        began = time.time()
        tempfile.mkstemp(dir=folder)
        while not os.path.exists(f"{folder}/may_end"):
            time.sleep(0.01)
        return f"{began} {time.time()}"
'''


TOOL_NAMES = ("add", "slow_add", "ends_all", "leaves", "bad", "late", "cancels", "cancels_in_thread", "half", "Counter")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tools") / "user_tools.py"
    path.write_text(TOOLS)
    return str(path)


@pytest.fixture(scope="module")
def kit(file: str) -> ToolKit:
    return load_tools([f"{file}:{name}" for name in TOOL_NAMES])


def call(tools: EpisodeTools, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(tools.call(ToolCall(name, arguments)))


def test_schemas_and_results(kit: ToolKit) -> None:
    names = [schema["function"]["name"] for schema in kit.schemas]
    assert names == [*TOOL_NAMES[:-1], "increase"]
    parameters = kit.schemas[0]["function"]["parameters"]
    assert parameters["properties"]["a"] == {"type": "integer", "description": "the first"}
    assert parameters["required"] == ["a"]
    tools = asyncio.run(kit.open(60.0, 100))
    assert call(tools, "add", a=2) == ToolResult("3")
    assert call(tools, "slow_add", a=0) == ToolResult("1")
    assert call(tools, "bad", how="table") == ToolResult('{"é": [1, null]}')


def test_each_episode_has_its_own_environment(kit: ToolKit) -> None:
    first, second = (asyncio.run(kit.open(60.0, 100)) for _ in range(2))
    assert asyncio.run(first.reset({"start": 3, "question": "?"})) == " It begins at 3."
    assert [call(first, "increase", by=2).text, call(first, "increase", by=2).text] == ["5", "7"]
    assert call(second, "increase", by=1).text == "1"


def test_only_methods_of_an_environment_are_tools(file: str) -> None:
    """Not what it holds; its properties are not even looked at."""
    kit = load_tools([f"{file}:Graded"])
    tools = asyncio.run(kit.open(60.0, 100))
    assert [*tools.by_name] == [schema["function"]["name"] for schema in kit.schemas] == ["look"]
    assert call(tools, "look") == ToolResult("0")
    assert asyncio.run(tools.reward()) == 0.25
    unread = ToolCall("look", {}, error="the arguments of look are no JSON object")
    assert asyncio.run(tools.call(unread)) == ToolResult("Error: the arguments of look are no JSON object", "raised")


def test_results_that_are_cut_or_no_text_are_named(kit: ToolKit, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    tools = asyncio.run(kit.open(60.0, 100, lambda: "step 1: prompt 4, sample 0, turn 2"))
    call(tools, "bad", how="megabyte")
    call(tools, "bad", how="bytes")
    where = "step 1: prompt 4, sample 0, turn 2: the tool bad returned"
    assert [record.getMessage() for record in caplog.records] == [
        f"{where} 1048576 characters: the policy is shown rollout.limits.tool_characters=100",
        f"{where} bytes that are no UTF-8: they are replaced",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "text", "error"),
    [
        ("bad", {"how": "raise"}, "Error: ZeroDivisionError: division by zero", "raised"),
        ("bad", {"how": "exit"}, "Error: ExitCallError: it called os._exit(3): return, or raise an error", "raised"),
        ("bad", {"how": "system_exit"}, "Error: RuntimeError: it raised SystemExit(1)", "raised"),
        (
            "ends_all",
            {"status": 1},
            "Error: ExitCallError: it raised SystemExit(1): return, or raise an error",
            "raised",
        ),
        ("leaves", {"status": 3}, "Error: ExitCallError: it called os._exit(3): return, or raise an error", "raised"),
        ("bad", {"how": "hang"}, "Error: bad took longer than 0.2 s", "timeout"),
        ("slow_add", {"a": 3600}, "Error: slow_add took longer than 0.2 s", "timeout"),
        (
            "cancels",
            {"how": "other"},
            "Error: SelfCancelledError: it raised CancelledError, and nobody had cancelled it",
            "raised",
        ),
        ("cancels", {"how": "own"}, "Error: SelfCancelledError: it cancelled its own task", "raised"),
        ("cancels_in_thread", {}, "Error: RuntimeError: it raised CancelledError()", "raised"),
        ("half", {"raises": False}, "?", None),
        ("half", {"raises": True}, "Error: ValueError: ?", "raised"),
        ("bad", {"how": "bytes"}, "a\ufffd\ufffdb", None),
        ("bad", {"how": "megabyte"}, "x" * 100 + "... (1048476 characters left out)", None),
        ("add", {"a": 1, "c": 2}, "Error: TypeError: add() got an unexpected keyword argument 'c'", "raised"),
        ("minus", {}, "Error: there is no tool minus", "raised"),
        ("m" * 2**20, {}, "Error: there is no tool " + "m" * 76, "raised"),
    ],
)
def test_a_bad_call_is_a_result(
    kit: ToolKit, name: str, arguments: dict[str, Any], text: str, error: str | None
) -> None:
    limit_s = 0.2 if error == "timeout" else 60.0
    assert call(asyncio.run(kit.open(limit_s, 100)), name, **arguments) == ToolResult(text, error)


def test_calls_that_hang_are_named_and_bounded(kit: ToolKit, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    before = set(threading.enumerate())

    async def many() -> list[ToolResult]:
        own = replace(kit, calls=ToolThreads())
        tools = await own.open(0.05, 100, lambda: "prompt 4, sample 0, turn 2")
        patient = await own.open(60.0, 100)
        await tools.call(ToolCall("late", {"file": str(tmp_path / "late")}))
        hanging = [await tools.call(ToolCall("bad", {"how": "hang"})) for _ in range(MOST_HANGING + 3)]
        assert tools.calls.hanging == {"late": 1, "bad": MOST_HANGING}
        (tmp_path / "late").touch()
        while tools.calls.hanging["late"]:
            await asyncio.sleep(0.02)
        assert tools.calls.hanging == {"late": 0, "bad": MOST_HANGING}
        return [*hanging, await patient.call(ToolCall("add", {"a": 1}))]

    *hanging, added = asyncio.run(many())
    left = [*set(threading.enumerate()) - before]
    while len(left) > MOST_HANGING:  # a thread ends after its call
        left = [thread for thread in left if thread.is_alive()]
    assert len(left) == MOST_HANGING
    assert hanging[0] == ToolResult("Error: bad took longer than 0.05 s", "timeout")
    assert hanging[-3:] == [ToolResult("Error: bad is not called: 16 of its calls still hang", "timeout")] * 3
    assert added == ToolResult("2")
    warning = "prompt 4, sample 0, turn 2: the tool bad took longer than 0.05 s (rollout.limits.tool_s)"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"].count(warning) == 16


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_example("Tools", tmp_path)
    (tmp_path / "notes.txt").write_text("a rose\na tree\nanother rose\n")
    monkeypatch.chdir(tmp_path)
    kit = load_tools(settings["rollout"]["tools"])
    tools = asyncio.run(kit.open(60.0, 100))
    asyncio.run(tools.reset({"question": "?"}))
    assert call(tools, "search", query="rose") == ToolResult('["a rose\\n", "another rose\\n"]')
    assert [call(tools, "note", line="x").text for _ in range(2)] == ["1 lines", "2 lines"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["untyped"], "a tool needs type hints and a docstring with `Args:`"),
        (["WORD"], "a tool is a function or a class, not str"),
        (["ad"], "has no ad (did you mean bad?)"),
        (["add", "add"], "two tools have the name add: rename one"),
    ],
)
def test_what_is_no_tool_is_refused(file: str, names: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        load_tools([f"{file}:{name}" for name in names])
    assert message in str(refused.value)
    assert str(refused.value).startswith("rollout.tools")


@pytest.mark.parametrize("processes", [None, 1])
def test_a_function_makes_the_environments(file: str, processes: int | None) -> None:
    factory = f"{file}:make_counter"

    async def episode() -> list[Any]:
        tools = await kit.open(60.0, 100)
        said = [await tools.reset({"start": 3}), (await tools.call(ToolCall("increase", {"by": 2}))).text]
        environments = [(one.count, one.by) for one in tools.environments]
        await tools.close()
        await kit.close()
        return [*said, environments]

    kit = load_tools([f"{file}:add"], processes, {factory: {"by": 8}}, factory)
    assert [schema["function"]["name"] for schema in kit.schemas] == ["add", "increase"]
    assert asyncio.run(episode()) == [" It begins at 3.", "5", [(5, 8)] if processes is None else []]


@pytest.mark.parametrize("processes", [None, 1])
def test_an_environment_by_its_name(file: str, processes: int | None) -> None:
    """Each is played with its own tools and those of all; two names may be of one kind."""
    factories = {"sums": f"{file}:make_counter", "views": f"{file}:Graded", "more_sums": f"{file}:make_counter"}

    async def episode(name: str) -> tuple[str, list[str], float | None]:
        tools = await kit.by_environment[name].open(20.0, 100)
        said, reward = await tools.reset({"start": 3}), await tools.reward()
        await tools.close()
        return said, sorted(tools.by_name), reward

    async def episodes() -> list[Any]:
        try:
            return [await episode(name) for name in factories]
        finally:
            await kit.close()

    kit = load_tools([f"{file}:add"], processes, {f"{file}:make_counter": {"by": 8}}, factories)
    assert [schema["function"]["name"] for schema in kit.schemas] == ["add"]
    sums = (" It begins at 3.", ["add", "increase"], None)
    assert asyncio.run(episodes()) == [sums, ("", ["add", "look"], 0.25), sums]
    for name, names in (("sums", ["add", "increase"]), ("views", ["add", "look"])):
        assert [schema["function"]["name"] for schema in kit.by_environment[name].schemas] == names


def test_two_tools_of_one_name_are_refused_in_one_episode_only(file: str) -> None:
    with pytest.raises(UserError, match="two tools have the name increase"):
        load_tools([f"{file}:Counter"], factory={"a": f"{file}:Graded", "b": f"{file}:make_counter"})


def test_a_factory_that_makes_nothing_is_refused(file: str) -> None:
    with pytest.raises(
        UserError, match=r"^rollout\.environment_factory .*: no environment .* LookupError: no such game"
    ):
        load_tools([], factory=f"{file}:nothing")


def test_a_call_ends_with_its_episode_or_is_counted_while_it_hangs(file: str, tmp_path: Path) -> None:
    """One that ends within its limit does not hang: aborted episodes leave many such."""
    kit = load_tools([f"{file}:{name}" for name in ("waits", "late", "bad")])

    async def cancelled() -> None:
        tools, before = await kit.open(600.0, 100), set(threading.enumerate())
        waits, late = tmp_path / "waits", tmp_path / "late"
        calls = (("waits", {"file": str(waits)}), ("late", {"file": str(late)}), ("bad", {"how": "hang"}))
        running = [asyncio.create_task(tools.call(ToolCall(name, arguments))) for name, arguments in calls]
        while not waits.exists():
            await asyncio.sleep(0)
        for one in running:
            one.cancel()
        await asyncio.wait(running)
        assert all(one.cancelled() for one in running)
        late.touch()
        while len(set(threading.enumerate()) - before) > 1:
            await asyncio.sleep(0.01)
        assert not any(kit.calls.hanging.values())  # type: ignore[union-attr]
        skip(600.0)
        await asyncio.sleep(0.01)
        assert +kit.calls.hanging == {"bad": 1}  # type: ignore[union-attr]
        assert waits.read_text() == "ended"

    run_with_skips(cancelled())


def test_a_tool_that_there_is_not_is_logged(kit: ToolKit, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    tools = asyncio.run(kit.open(60.0, 100, lambda: "step 1: prompt 4, sample 0, turn 2"))
    call(tools, "min\nus" + "s" * 1000)
    (record,) = caplog.records
    assert record.getMessage() == "step 1: prompt 4, sample 0, turn 2: there is no tool min us" + "s" * 94


@pytest.mark.parametrize("processes", [None, 1])
def test_calls_of_bounded_tools_wait_for_each_other_beyond_their_limit(
    file: str, tmp_path: Path, processes: int | None
) -> None:
    """Those of all episodes, which have processes of their own."""

    async def many() -> list[ToolResult]:
        opened = [await kit.open(1e6 if number < 2 else 600.0, 1000) for number in range(7)]
        call = ToolCall("work", {"folder": str(tmp_path)})
        calls = [asyncio.create_task(tools.call(call)) for tools in opened]
        while len([*tmp_path.iterdir()]) < 2:
            await asyncio.sleep(0.02)
        skip(1000.0)  # longer than the limit of those that wait
        await asyncio.sleep(0.02)
        (tmp_path / "may_end").touch()
        results = await asyncio.gather(*calls)
        for tools in opened:
            await tools.close()
        await kit.close()
        return results

    kit = load_tools([f"{file}:Slow"], processes)
    kit.check(3.0)
    with pytest.raises(UserError, match=r"^rollout\.tool_args .*:Slow: timeout_s=2.5 is not below .*tool_s=2.5, "):
        kit.check(2.5)
    results = run_with_skips(many())
    assert {result.error for result in results} == {None}
    spans = [tuple(map(float, result.text.split())) for result in results]
    at_once = [sum(began <= moment < ended for began, ended in spans) for moment, _ in spans]
    assert max(at_once) == 2
