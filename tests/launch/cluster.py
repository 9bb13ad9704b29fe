"""A real Slurm of three virtual nodes on this machine, with munge of its own; nothing outside its folder is used."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_mp.distributed.ports import claim_ports

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2", "n3")
START_TIMEOUT_S = 120.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=0
KillWait=10
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmctldPort={port}
MpiDefault=none
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n[1-3] Default=YES MaxTime=60 State=UP OverSubscribe=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=n[1-3] MaxTime=60 State=UP PriorityTier=9
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000 State=UNKNOWN"


def missing_requirement() -> str | None:
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons start jobs of other users: needs root"


class Cluster:
    """Slurm's daemons, started; `stop` ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons = list[subprocess.Popen[bytes]]()
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        claims = [claim_ports() for _ in range(1 + len(NODES))]
        host = socket.gethostname()
        ports = [claim.port for claim in claims]
        nodes = "\n".join(NODE.format(name=n, host=host, port=p) for n, p in zip(NODES, ports[1:], strict=True))
        text = CONFIG.format(host=host, folder=folder, port=ports[0], nodes=nodes)
        (folder / "slurm.conf").write_text(text.lstrip())
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        try:
            self._start()
        except BaseException:
            self._end_daemons()
            raise
        finally:
            for claim in claims:  # a claimed port can be bound
                claim.release()

    def run(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout.strip()

    @contextmanager
    def node_in_state(self, node: str, state: str) -> Iterator[None]:
        """Inside, the node is DOWN or in DRAIN, as an administrator's command or a failure leaves it."""
        self.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
        try:
            yield
        finally:
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def states(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()

    def stop(self) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environment, check=False)
        wait_until(lambda: not self.run("squeue", "--noheader"), "jobs to end")
        self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(START_TIMEOUT_S)

    def _start(self) -> None:
        self.folder.chmod(0o755)  # munged wants to know who could have made its socket
        munge = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file")]
        munge += [f"--{name}-file={self.folder}/munge.{name}" for name in ("log", "seed")]
        self._daemon("munged", "--foreground", "--force", *munge)
        wait_until((self.folder / "munge.socket").exists, "munged")
        self._daemon("slurmctld", "-D")
        # A node that finds no controller tries again later and later.
        wait_until(lambda: self.run("scontrol", "ping").count("UP"), "slurmctld")
        for node in NODES:
            self._daemon(*self._slurmd(node))
        wait_until(lambda: self.states() == ["idle"] * len(NODES), "the nodes", 300.0)

    def _slurmd(self, node: str) -> tuple[str, ...]:
        return ("slurmd", "-D", "-N", node)

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)
        self._daemons.append(daemon)


def wait_until(condition: Callable[[], object], name: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return when `condition` is true; a command that fails counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while not _is_true(condition):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {name}"
        time.sleep(0.2)


def _is_true(condition: Callable[[], object]) -> bool:
    try:
        return bool(condition())
    except subprocess.CalledProcessError:
        return False
