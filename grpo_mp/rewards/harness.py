"""What the jailed interpreter executes: the program, then its tests. Its text is handed over, it is never imported.

Arguments: descriptors of the program, of the tests and of the verdict; without tests, of the program alone. Tests run
in a process of their own, which the program, its child, can neither write to nor end; they reach it over pipes. Calls
go there, values come back: numbers, texts, containers, arrays of them. Any other object of the program is a `Proxy`,
which never equals a value, and no operation gives the program the value that a test compares with. What a call has
changed in its arguments is changed in the test's lists, sets and dictionaries, too.

Names that tests use and do not define are the program's, but for builtins, unless the tests use nothing else, and for
modules; the module `solution` has all of its names. What pytest and unittest would find in the tests is called after
their last statement. Comparisons of two objects of the program are its own word. The verdict is a random token that
follows the tests in their file; it is read and written after the last test.
"""

import ast
import builtins
import ctypes
import json
import operator
import os
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any, BinaryIO

PR_SET_DUMPABLE = 4
CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
MAPPINGS = (OrderedDict, Counter, defaultdict)  # equal dictionaries of the same content
TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "complex": (complex, repr, complex),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, str, Fraction),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
}
OWN_OBJECTS = ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "and_", "or_", "xor")  # both operands are proxies
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "instancecheck": lambda kind, value: isinstance(value, kind),
    **{one.__name__: one for one in (getattr, setattr, len, iter, next, bool, int, float, str, repr, hash)},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "index", *OWN_OBJECTS)},
}
ITERATION = ("call", "iter", "next")  # what the program may do with any object that a test gives it
LIBRARY = ("builtins", "math", "re", "collections", "itertools", "heapq", "bisect", "fractions", "decimal", "datetime")


class Proxy:
    """An object of the other process."""

    __slots__ = ("_number_", "_peer_")
    _peer_: "Peer"
    _number_: int

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_peer_", peer)
        object.__setattr__(self, "_number_", number)


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Proxy, *args: Any, **kwargs: Any) -> Any:
        if name in OWN_OBJECTS and not isinstance(args[0], Proxy):
            return NotImplemented
        return self._peer_.request(name, self, args, kwargs)

    return forward


for _name in OPERATIONS:
    setattr(Proxy, f"__{_name.rstrip('_')}__", _forward(_name))


class Peer:
    """One end of the pipes: sends requests, and answers those of the other end while it waits."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, names: dict[str, Any], guard: str | None) -> None:
        """Take the namespace that the other end may read; `guard`: the only module whose objects it may look into."""
        self._reader, self._writer, self._names, self._guard = reader, writer, names, guard
        self._own: list[Any] = []
        self._proxies: dict[int, Proxy] = {}
        self._exceptions: dict[str, type[BaseException]] = {}

    def request(self, name: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Have the other end do an operation. Raises what it raises, EOFError where that end is gone."""
        self._send([name, *map(self.encode, (target, args, kwargs or {}))])
        while len(message := self._receive()) != 3:
            self._answer(*message)
        error, value, after = message
        for given, changed in zip(args, self.decode(after), strict=True):
            _restore(given, changed)
        if error:
            raise self._exception(*error)(*self.decode(value))
        return self.decode(value)

    def begin(self) -> None:
        """Say that the program has run to its end."""
        self._send([])

    def wait(self) -> None:
        """Wait until the other end has said so. Raises EOFError where it is gone."""
        self._receive()

    def serve(self) -> None:
        """Answer requests until the other end closes. Raises EOFError then."""
        while True:
            self._answer(*self._receive())

    def _answer(self, name: str, *parts: Any) -> None:
        error: list[str] | None = None
        args: tuple[Any, ...] = ()
        try:
            if self._guard and [*parts[0]] != ["yours"]:
                raise PermissionError("the program may use no object that the tests did not give it")
            target, args, kwargs = map(self.decode, parts)
            value = self._names[target] if name == "name" else self._operate(name, target, args, kwargs)
            reply = self.encode(value, with_functions=name == "name")
        except BaseException as raised:  # noqa: BLE001 - the other end raises it
            error = _describe(type(raised)) if name != "name" else ["NameError", "NameError"]
            reply = self.encode(raised.args)
        kept = [value if isinstance(value, list | dict | set | bytearray | deque) else None for value in args]
        self._send([error, reply, self.encode(kept)])

    def _operate(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._guard and name not in ITERATION:
            private = name in ("getattr", "setattr") and args[0].startswith("_")
            if private or type(target).__module__ != self._guard:
                raise PermissionError(f"{name} of an object of the tests")
        return OPERATIONS[name](target, *args, **kwargs)

    def encode(self, value: Any, with_functions: bool = False) -> Any:
        """Return a value as JSON knows it; any other object by its number."""
        if value is None or isinstance(value, bool | str | float):
            return str(value) if isinstance(value, str) else float(value) if isinstance(value, float) else value
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return (
                {"array": [str(value.dtype), self.encode(value.tolist())]} if value.ndim else self.encode(value.item())
            )
        for name, kind in CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self.encode(item) for item in value]}
        if isinstance(value, dict) and (type(value) is dict or isinstance(value, MAPPINGS)):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        for name, (kind, to_text, _) in TEXTS.items():
            if isinstance(value, kind):
                return {name: to_text(value)}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, timedelta):
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, Proxy):
            return {"yours": value._number_}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": _describe(value)}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if (isinstance(value, type) or with_functions) and _is_of_library(value):
            return {"library": [value.__module__, value.__qualname__]}
        number = next((number for number, own in enumerate(self._own) if own is value), len(self._own))
        self._own += [value] * (number == len(self._own))
        return {"mine": number}

    def decode(self, value: Any) -> Any:
        """Return the value that the other end has encoded."""
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in CONTAINERS:
            return CONTAINERS[kind](self.decode(item) for item in content)
        if kind in TEXTS:
            return TEXTS[kind][2](content)
        return getattr(self, f"_decode_{kind}")(content)

    def _decode_dict(self, content: list[Any]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in content}

    def _decode_array(self, content: list[Any]) -> Any:
        return import_module("numpy").array(self.decode(content[1]), dtype=content[0])

    def _decode_timedelta(self, content: list[int]) -> timedelta:
        return timedelta(*content)

    def _decode_range(self, content: list[int]) -> range:
        return range(*content)

    def _decode_yours(self, number: int) -> Any:
        return self._own[number]

    def _decode_mine(self, number: int) -> Proxy:
        return self._proxies.setdefault(number, Proxy(self, number))

    def _decode_exception(self, content: list[str]) -> type[BaseException]:
        return self._exception(*content)

    def _decode_module(self, name: str) -> types.ModuleType:
        return import_module(name)

    def _decode_library(self, content: list[str]) -> Any:
        module, name = content
        value = getattr(import_module(module), name) if module in LIBRARY else None
        if not (isinstance(value, type) or (callable(value) and module != "builtins")):  # eval is none of them
            raise PermissionError(f"{name} of {module}")
        return value

    def _exception(self, name: str, base: str) -> type[BaseException]:
        """Return a built-in exception, or one of the program's name over the built-in that it is derived from."""
        kind = getattr(builtins, base)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise PermissionError(f"{base} is no exception")
        return kind if name == base else self._exceptions.setdefault(name, type(name, (kind,), {}))

    def _send(self, message: list[Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def _receive(self) -> list[Any]:
        if not (line := self._reader.readline()):
            raise EOFError("the program has ended")
        return json.loads(line)


def _restore(given: Any, changed: Any) -> None:
    """Change a container as the call changed its copy."""
    if isinstance(given, list | bytearray):
        given[:] = changed
    elif isinstance(given, dict | set | deque):
        given.clear()
        given.extend(changed) if isinstance(given, deque) else given.update(changed)


def _describe(error: type[BaseException]) -> list[str]:
    """Return the name of an exception and of the built-in one that it is or is derived from."""
    base = next(one for one in error.__mro__ if one.__module__ == "builtins")
    return [error.__name__, base.__name__]


def _is_of_library(value: Any) -> bool:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return module in LIBRARY and getattr(sys.modules.get(module), str(name), None) is value


class TestNames(dict[str, Any]):
    """The namespace of the tests; names that it lacks are the program's."""

    def __init__(self, tests: str) -> None:
        super().__init__(__name__="tests")
        nodes = [*ast.walk(ast.parse(tests))]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        looked_into = {
            one.value.id for one in nodes if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)
        }
        self.builtins = frozenset(vars(builtins)) if used - vars(builtins).keys() else frozenset[str]()
        self.modules = {name: name for name in looked_into & sys.stdlib_module_names} | {"np": "numpy"}
        self.peer: Peer
        self.update(_find_=self.find, _expect_=self.expect)
        solution = sys.modules["solution"] = types.ModuleType("solution")
        solution.__getattr__ = self.attribute  # type: ignore[method-assign]

    def __missing__(self, name: str) -> Any:
        if name in self.builtins:
            raise KeyError(name)
        if name in self.modules:
            return import_module(self.modules[name])
        try:
            return self.peer.request("name", name)
        except NameError:
            raise KeyError(name) from None

    def attribute(self, name: str) -> Any:
        """Return what the program has under this name. Raises AttributeError where it has nothing."""
        try:
            return self.peer.request("name", name)
        except NameError:
            raise AttributeError(name) from None

    def find(self, entry_point: str) -> Any:
        """Return the function of the program: by an expression, or a name, of a method of its class Solution, too."""
        if not entry_point.isidentifier():
            return eval(f"solution.{entry_point}", {"solution": sys.modules["solution"]})
        try:
            return getattr(self.attribute("Solution")(), entry_point)
        except Exception:  # noqa: BLE001 - it has no such class, or another one of that name
            return self.attribute(entry_point)

    def expect(self, entry_point: str, arguments: list[Any], allowed: list[Any]) -> None:
        """Raise AssertionError where the function returns none of the values that are allowed."""
        value = as_lists(self.find(entry_point)(*arguments))
        if not any(value == one for one in allowed):
            raise AssertionError(f"{entry_point} returned {value!r}")


def as_lists(value: Any) -> Any:
    """Return a value with lists in the place of its tuples."""
    if isinstance(value, list | tuple):
        return [as_lists(item) for item in value]
    return {key: as_lists(item) for key, item in value.items()} if isinstance(value, dict) else value


def run_collected(names: dict[str, Any]) -> None:
    """Call the functions and classes of tests that pytest and unittest would find. Raises what they raise."""
    for name, value in [*names.items()]:
        if getattr(value, "__module__", None) != "tests":
            continue
        if (
            isinstance(value, type)
            and "unittest" in sys.modules
            and issubclass(value, sys.modules["unittest"].TestCase)
        ):
            unittest = sys.modules["unittest"]
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            if not result.wasSuccessful():
                raise AssertionError(f"{name} failed")
        elif isinstance(value, type) and name.startswith("Test"):
            for method in (one for one in dir(value) if one.startswith("test")):
                instance = value()
                if hasattr(instance, "setup_method"):
                    instance.setup_method(*[None] * (instance.setup_method.__code__.co_argcount - 1))
                call_test(getattr(instance, method), names)
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            call_test(value, names)


def call_test(function: Any, names: dict[str, Any]) -> None:
    """Call a test with each of its parameters and with its fixtures; one that the tests call themselves is left out."""
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            given = dict(zip(("argnames", "argvalues"), mark.args, strict=False)) | mark.kwargs
            cases = [case | row for case in cases for row in read_parameters(given["argnames"], given["argvalues"])]
    code = function.__code__
    needed = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
    for case in cases:
        missing = [name for name in needed if name not in (*case, "self")]
        if all(hasattr(names.get(name), "__wrapped__") for name in missing):
            function(**case, **{name: make_fixture(name, names) for name in missing})


def read_parameters(argnames: Any, argvalues: Any) -> list[dict[str, Any]]:
    """Return the arguments that pytest.mark.parametrize gives, of each case."""
    keys = [key.strip() for key in argnames.split(",")] if isinstance(argnames, str) else [*argnames]
    rows = [row.values if type(row).__name__ == "ParameterSet" else row for row in argvalues]
    is_one = isinstance(argnames, str) and len(keys) == 1
    wrapped = ((row,) if is_one and plain is row else row for row, plain in zip(rows, argvalues, strict=True))
    return [dict(zip(keys, row, strict=True)) for row in wrapped]


def make_fixture(name: str, names: dict[str, Any]) -> Any:
    """Return the value of a fixture of the tests."""
    function = names[name].__wrapped__
    needed = function.__code__.co_varnames[: function.__code__.co_argcount]
    value = function(**{other: make_fixture(other, names) for other in needed})
    return next(value) if isinstance(value, types.GeneratorType) else value


def main(program: int, tests: int | None = None, verdict: int | None = None) -> None:
    """Run the program, or the program in a child and tests here. Raises what tests raise; status 0 after the last."""
    module = types.ModuleType("__main__" if tests is None else "solution")  # which tests import
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    if tests is None or verdict is None:
        return run(program, module)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the same user may trace or write to this one
    (requests, to_child), (replies, to_parent) = os.pipe(), os.pipe()
    if os.fork():
        os.close(requests)
        os.close(to_parent)
        judge(tests, verdict, os.fdopen(replies, "rb"), os.fdopen(to_child, "wb"))
    for descriptor in (tests, verdict, to_child, replies):
        os.close(descriptor)
    peer = Peer(os.fdopen(requests, "rb"), os.fdopen(to_parent, "wb"), vars(module), None)
    run(program, module)
    peer.begin()
    peer.serve()


def run(program: int, module: types.ModuleType) -> None:
    """Run the program."""
    with open(program, "rb") as file:
        exec(compile(file.read(), "program.py", "exec"), vars(module))


def judge(tests: int, verdict: int, reader: BinaryIO, writer: BinaryIO) -> None:
    """Run the tests; write the token and end the process after the last."""
    size = int(os.read(tests, 16))
    text = os.read(tests, size).decode()
    names = TestNames(text)
    names.peer = Peer(reader, writer, {}, "tests")
    names.peer.wait()
    exec(compile(text, "tests.py", "exec"), names)
    run_collected(names)
    os.write(verdict, os.read(tests, 64))
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
