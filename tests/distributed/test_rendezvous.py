"""Networks of the sockets of ranks; what a rank says that does not arrive."""

import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from grpo_mp.distributed.ports import claim_ports
from grpo_mp.distributed.rendezvous import RECORDER_VARIABLE, rendezvous
from grpo_mp.utils.errors import UserError

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
RANK = """
import sys
import torch
import torch.distributed as dist
from grpo_mp.distributed.process_groups import join_job

job = join_job(60.0)
total = torch.ones(1)
dist.all_reduce(total, group=job.group)
print(int(total), flush=True)
sys.stdin.read()
"""


def listening(**environment: str) -> set[str]:
    """Addresses at which two ranks listen, once they have exchanged a tensor."""
    claim = claim_ports()
    common = {"WORLD_SIZE": "2", "MASTER_PORT": str(claim.port), **environment}
    ranks = [start({**common, "RANK": str(rank), "LOCAL_RANK": "0"}) for rank in range(2)]
    try:
        assert [rank.stdout.readline() for rank in ranks] == [b"2\n", b"2\n"]
        sockets = [one for rank in ranks for one in psutil.Process(rank.pid).net_connections("inet")]
        return {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=LIMIT_S)
        claim.release()


def start(environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    others = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "NCCL_"))}
    return subprocess.Popen(
        [sys.executable, "-c", RANK],
        env={**others, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def network() -> tuple[str, str]:
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return name, one.address
    pytest.skip("this machine has no network")


def test_ranks_of_one_node_are_on_loopback() -> None:
    """Whatever name the batch script gives the node."""
    assert listening(MASTER_ADDR=socket.gethostname(), LOCAL_WORLD_SIZE="2") == {"127.0.0.1"}


def test_ranks_of_several_nodes_are_on_the_network_between_them() -> None:
    name, address = network()
    assert listening(MASTER_ADDR=address, LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME=name) == {address}


def test_a_rank_that_does_not_arrive_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claim_ports()
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    environment |= {"MASTER_PORT": str(claim.port), "LOCAL_RANK": "0", RECORDER_VARIABLE: "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^rank 1 cannot reach the rendezvous at localhost:{claim.port}: "):
        rendezvous(datetime.timedelta(seconds=1))
