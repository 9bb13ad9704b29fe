"""Which networks the sockets of ranks are on that srun starts: those of one node on none."""

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
from grpo_mp.distributed.rendezvous import RECORDER_VARIABLE, _listener, rendezvous
from grpo_mp.utils.errors import UserError

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
RANK = """
import os
import socket
import sys
import torch
import torch.distributed as dist
from grpo_mp.distributed.process_groups import join_job

if named := os.environ.get("FIRST_ADDRESS_OF_LOCALHOST"):  # as another resolver than that of the ranks' libc
    resolve = socket.getaddrinfo
    socket.getaddrinfo = lambda host, *rest, **more: [
        one for name in ([named, host] if host == "localhost" else [host]) for one in resolve(name, *rest, **more)
    ]
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


def test_nodes_meet_whichever_address_of_the_name_each_tries_first() -> None:
    """The first node's is that of the network, with loopback behind it; the other node tries loopback."""
    name, address = network()
    listens = listening(2, MASTER_ADDR="localhost", FIRST_ADDRESS_OF_LOCALHOST=address, GLOO_SOCKET_IFNAME=name)
    assert address in listens
    assert listens & {"0.0.0.0", "::"}


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    found = [info for address in addresses for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize("times", [1, 2])
def test_the_store_is_at_the_only_address_of_a_name(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Also of one that a hosts file has twice."""
    _, address = network()
    resolving(monkeypatch, *[address] * times)
    claim = claim_ports()
    listener = _listener("node0", claim.port)
    claim.release()
    assert listener
    with listener:
        assert listener.getsockname() == (address, claim.port)


@pytest.mark.parametrize("addresses", [["192.0.2.7", "198.51.100.7"], ["192.0.2.7", "::1"], ["127.0.1.1"], []])
def test_the_store_is_on_every_network_where_the_name_does_not_say_which(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    resolving(monkeypatch, *addresses)
    assert _listener("node0", 29500) is None


def test_a_rank_that_does_not_arrive_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claim_ports()
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    environment |= {"MASTER_PORT": str(claim.port), "LOCAL_RANK": "0", RECORDER_VARIABLE: "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    resolving(monkeypatch, "192.0.2.7", "198.51.100.7")
    place = rf"localhost:{claim.port} \(localhost is 192\.0\.2\.7 and 198\.51\.100\.7 here\)"
    with pytest.raises(UserError, match=rf"^rank 1 cannot reach the rendezvous at {place}: "):
        rendezvous(datetime.timedelta(seconds=1))
