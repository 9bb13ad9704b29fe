"""Runs a program and its tests in the sandbox. The text of this file is sent there; the file is never imported.

The tests see the names of the program. Exceptions: a builtin keeps its meaning unless the tests use only builtins, and
a module of the standard library keeps its meaning if the tests use its attributes. The module `solution` has all names
of the program. After the last statement of the tests, the functions and classes that pytest and unittest would collect
run. Only after them are a random token and the values received by `_call_` written; the expected values stay outside
the sandbox.
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
    """Run program and tests, and write the token after the last test. Exceptions of both propagate."""
    if os.path.isfile(__file__):
        os.remove(__file__)  # so that the program cannot read its tests
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
    """Return the namespace in which the tests run, see the module's docstring."""
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
    """Return the program's function, by an expression or by a name; a method of its class Solution comes first."""
    if not entry_point.isidentifier():
        return eval(entry_point, vars(module))
    try:
        return getattr(module.Solution(), entry_point)
    except Exception:  # noqa: BLE001 - the program has no class Solution with this method
        return getattr(module, entry_point)


def as_json(value: Any) -> Any:
    """Convert a value for JSON: a tuple to a list, a dictionary to a list of its pairs, other objects to their repr."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[as_json(key), as_json(item)] for key, item in value.items()]}
    return value if value is None or isinstance(value, bool | int | float | str) else {"object": repr(value)}


def run_collected(names: dict[str, Any]) -> None:
    """Run the test functions and classes that pytest and unittest would collect. Their exceptions propagate.

    A function with parameters that have no default is a helper, not a test.
    """
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
                getattr(instance, method)()
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            if value.__code__.co_argcount > len(value.__defaults__ or ()):  # a helper
                continue
            value()
