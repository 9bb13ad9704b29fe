"""Main program of the Python tool's sandboxed interpreter. Its source text is passed to the sandbox, never imported.

Command-line argument: time limit of one piece of code [s]. A request is a line of JSON with Python `code`, the reply a
line of JSON with what the code has printed as `value`. Variables live as long as the process.
"""

import ast
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn


def main(limit_s: float) -> None:
    """Run the code of each request until stdin is closed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    own = os.getpid()
    # Not inherited by child processes of the code
    requests = os.fdopen(os.dup(0))
    replies = os.dup(1)
    printed = os.open("printed", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(printed, 1)
    os.dup2(nowhere, 2)  # the pipe is not read: code that fills it would block

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError(f"the code took longer than {limit_s:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    for line in requests:
        code = json.loads(line)["code"]
        os.ftruncate(printed, 0)
        output = sys.stdout = os.fdopen(os.dup(1), "w")
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                run(code, names)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # noqa: BLE001 - any exception of the code is part of the output
            with suppress(OSError):  # the output file is full
                print("".join(traceback.format_exception_only(error)).strip(), file=output)
        try:
            output.flush()
        except OSError:
            os.dup2(nowhere, output.fileno())  # discard the output that did not fit, or the next run would print it
        except ValueError:  # the code closed stdout
            pass
        if os.getpid() != own:  # the code forked, and this is the child
            os._exit(0)
        text = os.pread(printed, 2**24, 0).decode(errors="replace")
        with open(replies, "w", closefd=False) as reply:
            reply.write(json.dumps({"value": text}) + "\n")


def run(text: str, names: dict[str, Any]) -> None:
    """Run code with the variables `names`; if the last statement is an expression, print its value unless None."""
    tree = ast.parse(text)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<cell>", "exec"), names)
        return
    exec(compile(ast.Module(tree.body[:-1], []), "<cell>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    if value is not None:
        print(repr(value))


if __name__ == "__main__":
    main(float(sys.argv[1]))
