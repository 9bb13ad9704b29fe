"""What a program with its tests executes: its text is sent to the sandbox, it is never imported.

Names that tests use and do not define are the program's, but for builtins, unless the tests use nothing else, and for
modules; the module `solution` has all of its names. After the last statement of the tests the functions and classes
that pytest and unittest would find are called. Then, and only then, a random token is written, with the values that
tests by `_call_` received: what is expected of them stays outside.
"""

import ast
import builtins
import json
import os
import sys
import types
from importlib import import_module
from typing import Any


def run(program: str, tests: str, token: str) -> None:
    """Run program and tests, and write the token after the last test. Raises what they raise."""
    if os.path.isfile(__file__):
        os.remove(__file__)  # the program cannot read it
    module = types.ModuleType("solution")
    sys.modules["__main__"] = sys.modules["solution"] = module
    saved = dict(vars(builtins))
    exec(compile(program, "program.py", "exec"), vars(module))
    vars(builtins).update(saved)
    values = list[Any]()
    names = make_names(tests, module)
    names["_find_"] = lambda entry_point: find(module, entry_point)
    names["_call_"] = lambda entry_point, arguments: values.append(as_json(find(module, entry_point)(*arguments)))
    exec(compile(tests, "tests.py", "exec"), names)
    run_collected(names)
    sys.stdout.flush()
    with open(1, "w", closefd=False) as output:
        output.write("\n" + token + json.dumps(values))
    os._exit(0)


def make_names(tests: str, module: types.ModuleType) -> dict[str, Any]:
    """Return the namespace of the tests."""
    nodes = list(ast.walk(ast.parse(tests)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    looked_into = {
        node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    names = dict(vars(module))
    if used - vars(builtins).keys():
        names = {name: value for name, value in names.items() if name not in vars(builtins)}
    modules = {name: name for name in looked_into & sys.stdlib_module_names}
    if "np" in looked_into and "np" not in names:
        modules["np"] = "numpy"
    names.update({name: import_module(path) for name, path in modules.items()})
    names["__name__"] = "__main__"
    return names


def find(module: types.ModuleType, entry_point: str) -> Any:
    """Return the program's function: by an expression or a name, of a method of its class Solution, too."""
    if not entry_point.isidentifier():
        return eval(entry_point, vars(module))
    try:
        return getattr(module.Solution(), entry_point)
    except Exception:  # noqa: BLE001 - it has no such class, or another one of that name
        return getattr(module, entry_point)


def as_json(value: Any) -> Any:
    """Return a value as JSON knows it: of a tuple a list, of a dictionary its pairs, of other objects their text."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[as_json(key), as_json(item)] for key, item in value.items()]}
    return value if value is None or isinstance(value, bool | int | float | str) else {"object": repr(value)}


def run_collected(names: dict[str, Any]) -> None:
    """Call the functions and classes of tests that pytest and unittest would find. Raises what they raise."""
    unittest = sys.modules.get("unittest")
    for name, value in list(names.items()):
        if getattr(value, "__module__", None) != "__main__":
            continue
        if isinstance(value, type) and unittest and issubclass(value, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            if not result.wasSuccessful():
                raise AssertionError(name + " failed")
        elif isinstance(value, type) and name.startswith("Test"):
            for method in (one for one in dir(value) if one.startswith("test")):
                instance = value()
                if hasattr(instance, "setup_method"):
                    instance.setup_method(*[None] * (instance.setup_method.__code__.co_argcount - 1))
                call_test(getattr(instance, method), names)
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            call_test(value, names)


def call_test(function: Any, names: dict[str, Any]) -> None:
    """Call a test with each of its parameters and its fixtures; helpers that the tests call themselves are left out."""
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            given = {**dict(zip(("argnames", "argvalues"), mark.args, strict=False)), **mark.kwargs}
            cases = [
                {**case, **row} for case in cases for row in read_parameters(given["argnames"], given["argvalues"])
            ]
    code = function.__code__
    needed = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
    for case in cases:
        missing = [name for name in needed if name not in (*case, "self")]
        if all(hasattr(names.get(name), "__wrapped__") for name in missing):
            function(**case, **{name: make_fixture(name, names) for name in missing})


def read_parameters(argnames: Any, argvalues: Any) -> list[dict[str, Any]]:
    """Return the arguments that pytest.mark.parametrize gives, of each case."""
    keys = [key.strip() for key in argnames.split(",")] if isinstance(argnames, str) else list(argnames)
    is_one = isinstance(argnames, str) and len(keys) == 1
    rows = [row.values if hasattr(row, "marks") else (row,) if is_one else row for row in argvalues]
    return [dict(zip(keys, row, strict=False)) for row in rows]


def make_fixture(name: str, names: dict[str, Any]) -> Any:
    """Return the value of a fixture of the tests."""
    function = names[name].__wrapped__
    needed = function.__code__.co_varnames[: function.__code__.co_argcount]
    value = function(**{other: make_fixture(other, names) for other in needed})
    return next(value) if isinstance(value, types.GeneratorType) else value
