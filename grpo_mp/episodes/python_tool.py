"""Python as a tool, in the sandbox of `reward.code`, with names that live through the turns of an episode."""

from functools import cache

from grpo_mp.rewards.sandbox import Sandbox
from grpo_mp.rewards.settings import CodeConfig

# Each call is a program of its own that runs the episode's cells again, those before without output: between calls
# nothing runs that would have to be watched.
PROGRAM = """
import ast, contextlib, io, sys, traceback
*before, cell = {cells!r}
names = {{"__name__": "__main__"}}
for earlier in before:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        exec(earlier, names)
try:
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
    if value is not None:
        print(repr(value))
except BaseException as error:
    print("".join(traceback.format_exception_only(error)).strip())
"""


class Python:
    """One episode's interpreter."""

    def __init__(self) -> None:
        self._cells: list[str] = []

    def python(self, code: str) -> str:
        """
        Run Python code and return what it prints, and the value of its last line. Names are kept for later calls.

        Args:
            code: the code to run
        """
        self._cells.append(code)
        outcome = sandbox().run(PROGRAM.format(cells=self._cells), None, "", sandbox_settings().timeout_s)
        if not outcome.passed:
            self._cells.pop()
            raise TimeoutError("the code was ended: it took too long, or too much memory or output")
        return outcome.output


@cache
def sandbox_settings() -> CodeConfig:
    """Return the limits of a program: the defaults of `reward.code`."""
    return CodeConfig()


@cache
def sandbox() -> Sandbox:
    """Return the rank's sandbox. Raises UserError where this machine cannot isolate programs."""
    return Sandbox(sandbox_settings())
