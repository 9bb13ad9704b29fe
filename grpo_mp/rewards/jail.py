"""A bare interpreter runs this file: it isolates one program, waits for it, and leaves none of its processes behind.

The monitor (this process) enters new user, mount, process, network and IPC namespaces and forks the program, which
is the first process of its process namespace: when it ends, the kernel ends all that it started. The program sees
system folders and this Python, read-only, and an empty folder of its own in memory; no /proc, no network. It runs
without capabilities and without the keys of its login, as a user who owns nothing: 65534 where the monitor is root,
else the monitor's own user, who alone is known in the namespace. Without namespaces (`isolate` false) only the limits
hold.
See namespaces(7), user_namespaces(7), pid_namespaces(7), pivot_root(2).
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import sys
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
LOCKED = 2 | 4 | 8 | 1024 | 2048  # flags of a mount that a namespace may not take away: nosuid, nodev, noexec, no*atime
MNT_DETACH = 2
KEYCTL = {"x86_64": 250, "aarch64": 219}  # number of the system call, which the C library has no function for
KEYCTL_JOIN_SESSION_KEYRING = 1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
NOBODY = 65534
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
HOME = "/program"  # its own folder inside


def main(job: dict[str, Any]) -> int:
    """Return 0 if the program ended with status 0 in time, else 1. What keeps it from starting goes to stderr."""
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    if job["isolate"]:
        _unshare(user)
    else:
        _libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the program leaves behind becomes a child of ours
    program = os.fork()
    if not program:
        _exec_program(job, user)
    ended = os.pidfd_open(program)
    # A pipe whose other end is closed is ready: whoever wanted the program wants it no longer, or is gone.
    timed_out = ended not in select.select([ended, job["control"]], [], [], job["timeout_s"])[0]
    if timed_out:
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    if not job["isolate"]:
        _end_children()
    return int(timed_out or os.waitstatus_to_exitcode(status) != 0)


def _unshare(user: int) -> None:
    """Enter new namespaces. Only a process outside may map two users, so a child that stays there writes the map."""
    proc, (read_end, write_end) = Path(f"/proc/{os.getpid()}"), os.pipe()
    map_writer = os.fork()
    if not map_writer:
        os.close(write_end)  # or the read would never end where the monitor dies before it writes
        if not os.read(read_end, 1):
            os._exit(1)
        if os.geteuid() == 0:
            users = groups = f"0 0 1\n{user} {user} 1"
        else:
            users, groups = f"{user} {user} 1", f"{os.getegid()} {os.getegid()} 1"
            # The kernel demands it before a user other than root may write gid_map.
            (proc / "setgroups").write_text("deny")
        (proc / "uid_map").write_text(users)
        (proc / "gid_map").write_text(groups)
        os._exit(0)
    _libc("unshare", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC)
    os.write(write_end, b"1")
    if os.waitpid(map_writer, 0)[1]:
        raise OSError("the user map was refused")


def _exec_program(job: dict[str, Any], user: int) -> None:
    """Turn this process into the program; where that fails, end it with a reason on the monitor's stderr."""
    monitor_stderr = os.dup(2)  # closed by exec
    try:
        source = Path(job["harness"]).read_text()
        if job["isolate"]:
            _pivot_root(Path(job["folder"]), [*SYSTEM, *job["visible"]], job["folder_bytes"])
        _set_limits(job)
        _leave_keyring()
        _drop_privileges(user)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.execve(job["python"], [job["python"], "-I", "-B", "-c", source, *job["arguments"]], job["environment"])
    except BaseException as error:  # noqa: BLE001 - whatever it is, this copy of the monitor must not continue
        os.write(monitor_stderr, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def _pivot_root(folder: Path, visible: list[str], size: int) -> None:
    """Enter a read-only root that holds `visible`, and a folder in memory for `size` bytes."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", str(folder), "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for name in visible:
        if os.path.exists(name):
            _bind_read_only(name, f"{folder}{name}")
    os.mkdir(f"{folder}{HOME}")
    _mount("tmpfs", f"{folder}{HOME}", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=777")
    _mount(None, str(folder), None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(folder)
    _libc("pivot_root", b".", b".")
    _libc("umount2", b".", MNT_DETACH)
    os.chdir(HOME)


def _bind_read_only(source: str, target: str) -> None:
    """Mount a file or folder at another path, read-only. A relative link, as /lib of usr/lib, is copied."""
    if os.path.islink(source) and not os.path.isabs(os.readlink(source)):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
        return
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        Path(target).touch()
    _mount(source, target, None, MS_BIND | MS_REC)
    _mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | os.statvfs(target).f_flag & LOCKED)


def _set_limits(job: dict[str, Any]) -> None:
    """Set the resource limits of the job, not above the hard limits of this process."""
    seconds = int(job["timeout_s"]) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["output_bytes"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _leave_keyring() -> None:
    """Enter an empty session keyring: namespaces leave a process that of its login, with keys that it could read.

    Where a container forbids the call, it forbids it to the program, too. See keyctl_join_session_keyring(3).
    """
    number = KEYCTL.get(os.uname().machine)
    if number is None:
        return
    joined = LIBC.syscall(ctypes.c_long(number), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None)
    if joined == -1 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        raise OSError(ctypes.get_errno(), "keyctl")


def _drop_privileges(user: int) -> None:
    """Give up root for good, and new rights through set-uid files; the kernel ends the program with its monitor."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_children() -> None:
    """Kill and reap until no child is left: the orphans of a killed child become children too."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():
        for child in map(int, pids):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    _libc("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _libc(name: str, *arguments: Any) -> None:
    if LIBC[name](*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except OSError as error:
        sys.exit(str(error))
