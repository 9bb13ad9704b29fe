"""Which networks the sockets of ranks are on that srun starts: those of one node on none."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from grpo_mp.distributed.ports import claim_ports

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


def listening(nodes: int, **environment: str) -> set[str]:
    """Addresses at which two ranks listen that are on so many nodes, once they have exchanged a tensor."""
    claim = claim_ports()
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // nodes), "MASTER_PORT": str(claim.port), **environment}
    ranks = [start({**common, "RANK": str(rank), "LOCAL_RANK": str(rank % (2 // nodes))}) for rank in range(2)]
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
    """Name and address of this machine's first network."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return name, one.address
    pytest.skip("this machine has no network")


def test_ranks_of_one_node_are_on_loopback() -> None:
    """Whatever name the batch script gives the node."""
    assert listening(1, MASTER_ADDR=socket.gethostname()) == {"127.0.0.1"}


def test_ranks_of_several_nodes_are_on_the_network_between_them() -> None:
    name, address = network()
    assert listening(2, MASTER_ADDR=address, GLOO_SOCKET_IFNAME=name) == {address}
