"""What the jailed interpreter executes: the program, then its tests. Its text is handed over, it is never imported.

Arguments: descriptor of the job {"program", "tests", "token"}, descriptor of the verdict. The verdict is the token,
which is random and written after the last test: a program that leaves early, by whatever way, or prints a verdict has
not written it. Asserts share the interpreter with the program, so code written against this very file could still
find the token, or return objects that equal everything; {input, output} tests are judged outside and leave no such way.
"""

import json
import os
import sys
import types


def main(job_descriptor: int, verdict_descriptor: int) -> None:
    with os.fdopen(job_descriptor) as file:
        job = json.load(file)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    write, leave = os.write, os._exit  # the program may replace them
    exec(compile(job["program"], "program.py", "exec"), vars(module))
    if job["tests"] is None:
        return
    exec(compile(job["tests"], "tests.py", "exec"), vars(module))
    write(verdict_descriptor, job["token"].encode())
    leave(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
