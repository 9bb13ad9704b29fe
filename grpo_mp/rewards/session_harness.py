"""What a jailed interpreter with state executes (see sandbox.py). Its text is handed over, it is never imported.

Arguments: descriptors of the code, of the pipes on which the end of a run is asked for and told, and the seconds of a
run. After each line of the pipe the code in the file is run, in names that live as long as the process; then the line
is sent back.
"""

import ast
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn


def main(code: int, requests: int, replies: int, seconds: float) -> None:
    """Run what is asked for until the pipe is closed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    own, limit = os.getpid(), seconds
    for descriptor in (code, requests, replies):
        os.set_inheritable(descriptor, False)  # for what the code starts

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError(f"the code took longer than {limit:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    while request := os.read(requests, 64):
        text = b"".join(iter_file(code)).decode()
        output = sys.stdout = os.fdopen(os.dup(1), "w")
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)
            try:
                run(text, names)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
            with suppress(OSError):  # a file that is full
                print("".join(traceback.format_exception_only(error)).strip(), file=output)
        try:
            output.flush()
        except OSError:
            os.dup2(nowhere, output.fileno())  # the rest is not of the next run
        except ValueError:  # the code has closed it
            pass
        if os.getpid() != own:  # a copy that the code made
            os._exit(0)
        os.write(replies, request)


def iter_file(descriptor: int) -> Any:
    """Read a file from its start, whoever has read or written it."""
    start = 0
    while piece := os.pread(descriptor, 2**16, start):
        yield piece
        start += len(piece)


def run(text: str, names: dict[str, Any]) -> None:
    """Run code, and print the value of its last expression."""
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
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
