"""Command lines that run a Python program in bubblewrap, Docker or Podman."""

import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from grpo_mp.sandbox.protocol import Limits, SandboxError

FOLDER = "/program"  # the working folder, in memory
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
ENVIRONMENT = {"HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
USERS = range(30_000, 60_000)  # of sandboxes that root starts


def isolate(kind: str, image: str, limits: Limits, program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs a Python program in a sandbox.

    `kind`: bubblewrap, docker or podman. `image`: for bubblewrap a folder with a root file system, or "" for
    the programs of this machine; else an image, which must have python3. Raises SandboxError if the kind is missing.
    """
    rlimits = {"AS": limits.memory_bytes, "CORE": 0, "NPROC": limits.processes}
    if kind == "bubblewrap":
        # The kernel exempts root from the limit of processes, so under root the program runs as another user. The limit
        # counts all processes of a user, so each sandbox has a user of its own.
        user = random.SystemRandom().choice(USERS) if os.geteuid() == 0 else None
        python = ["-I", "-B", "-c", _preamble(rlimits, user) + program, *arguments]
        return [*_bubblewrap(image, limits), "python3" if image else sys.executable, *python]
    del rlimits["NPROC"]  # containers have their own limit of processes
    return [*_container(kind, image, limits), "-I", "-B", "-c", _preamble(rlimits) + program, *arguments]


def _preamble(rlimits: Mapping[str, int], user: int | None = None) -> str:
    """Return Python code that limits its process, and changes from root to the user `user`, if given."""
    lines = list[str]()
    if user is not None:
        lines = ["os.setgroups([])", f"os.setresgid({user}, {user}, {user})", f"os.setresuid({user}, {user}, {user})"]
    lines += [f"resource.setrlimit(resource.RLIMIT_{name}, ({value}, {value}))" for name, value in rlimits.items()]
    return "\n".join(["import os, resource", *lines, ""])


def _bubblewrap(root: str, limits: Limits) -> list[str]:
    privileges = ("CAP_SETUID", "CAP_SETGID") if os.geteuid() == 0 else ()
    environment = ENVIRONMENT | {"PATH": "/usr/local/bin:/usr/bin:/bin" if root else f"{sys.prefix}/bin:/usr/bin:/bin"}
    return [
        *(_find("bwrap"), "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--new-session"),
        *([] if limits.network else ["--unshare-net"]),
        *([word for name in privileges for word in ("--cap-add", name)] or ["--unshare-user"]),
        *("--clearenv", *(word for pair in environment.items() for word in ("--setenv", *pair))),
        *(_folders_of(root) if root else _programs_of_this_machine()),
        *(_read_only(NETWORK_FILES) if limits.network else []),
        *("--perms", "0755", "--dir", "/dev"),
        *(word for name in DEVICES for word in ("--dev-bind-try", name, name)),
        *("--size", str(limits.folder_bytes), "--perms", "0777", "--tmpfs", FOLDER),
        *("--remount-ro", "/", "--chdir", FOLDER),
    ]


def _folders_of(root: str) -> list[str]:
    """Return bubblewrap's arguments that mount the top folders of a root file system read-only."""
    arguments = list[str]()
    for entry in sorted(Path(root).iterdir()):
        if entry.is_symlink():
            arguments += ["--symlink", os.readlink(entry), f"/{entry.name}"]
        elif entry.name not in ("dev", "proc", "sys", FOLDER[1:]):
            arguments += ["--ro-bind", str(entry), f"/{entry.name}"]
    return arguments


def _programs_of_this_machine() -> list[str]:
    return _read_only((*SYSTEM, *sorted({sys.prefix, sys.base_prefix})))


def _read_only(names: Sequence[str]) -> list[str]:
    arguments = list[str]()
    for name in names:
        if os.path.islink(name) and not os.path.isabs(os.readlink(name)):  # such as /lib -> usr/lib
            arguments += ["--symlink", os.readlink(name), name]
            continue
        # Other users cannot enter parent folders that bwrap creates by itself.
        for parent in reversed(Path(name).parents[:-1]):
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += ["--ro-bind-try", name, name]
    return arguments


def _container(program: str, image: str, limits: Limits) -> list[str]:
    environment = [word for pair in ENVIRONMENT.items() for word in ("--env", "=".join(pair))]
    return [
        *(_find(program), "run", "--name", f"grpo-mp-{uuid4().hex}"),  # in this order, see Container
        *("--rm", "--interactive", "--stop-timeout", "0", *environment),
        *([] if limits.network else ["--network", "none"]),
        *("--memory", str(limits.memory_bytes), "--pids-limit", str(limits.processes + 1)),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--tmpfs", f"{FOLDER}:size={limits.folder_bytes},mode=1777,exec", "--workdir", FOLDER),
        *("--entrypoint", "python3", image),
    ]


def _find(name: str) -> str:
    if path := shutil.which(name):
        return path
    raise SandboxError(f"{name} is not installed")
