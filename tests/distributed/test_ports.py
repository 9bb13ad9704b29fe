"""Ports against the real kernel, from one process and from several; networks of sockets."""

import datetime
import socket
import subprocess
import sys

import psutil
import pytest

from grpo_mp.distributed import ports
from grpo_mp.distributed.ports import PortClaim, claim_ports, own_address
from grpo_mp.distributed.rendezvous import RECORDER_VARIABLE, rendezvous
from grpo_mp.utils.errors import UserError

CLAIM = """
import sys
from grpo_mp.distributed import ports
ports.FIRST_PORT = int(sys.argv[1])
ports._last_port = lambda: ports.FIRST_PORT
ports.claim_ports()
"""


def single_free_port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    monkeypatch.setattr(ports, "FIRST_PORT", port)
    monkeypatch.setattr(ports, "_last_port", lambda: port)
    return port


def free_port() -> int:
    claim = claim_ports()
    claim.release()
    return claim.port


def test_claims_differ_and_can_be_bound() -> None:
    claims = [claim_ports() for _ in range(50)]
    assert len({claim.port for claim in claims}) == 50
    for claim in claims:
        with socket.create_server(("127.0.0.1", claim.port)):
            claim.release()


def test_a_claimed_port_is_not_chosen_again_until_released(monkeypatch: pytest.MonkeyPatch) -> None:
    port = single_free_port(monkeypatch)
    claim = claim_ports()
    assert claim.port == port
    with pytest.raises(UserError, match=f"no 1 free ports in a row between {port} and {port}"):
        claim_ports()
    claim.release()
    claim_ports().release()


def test_another_process_sees_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    port = single_free_port(monkeypatch)
    command = [sys.executable, "-c", CLAIM, str(port)]
    claim = claim_ports()
    assert b"no 1 free port" in subprocess.run(command, capture_output=True, timeout=300).stderr
    claim.release()
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == 0


def test_own_address_is_the_one_that_leads_to_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_address() == "localhost"
    routed = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
    for address in routed:
        if address.count(".") == 3 and not address.startswith("127."):
            monkeypatch.setenv("MASTER_ADDR", address)
            assert own_address() == address


def test_consecutive_ports_are_reserved_together_without_unused_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    first = claim_ports(15)
    first.release()
    monkeypatch.setenv(ports.JOB_PORTS, f"{first.port}-{first.port + 44}")
    claims: list[PortClaim] = []

    def claim_all() -> None:
        while True:
            claims.append(claim_ports(15))

    with pytest.raises(UserError, match=r"no 15 free ports in a row between"):
        claim_all()
    taken = [port for claim in claims for port in claim.ports]
    assert len(set(taken)) == len(taken)
    assert first.port in taken
    claims[0].release()
    with socket.create_server(("127.0.0.1", claims[0].ports[-1])), pytest.raises(UserError, match="in a row"):
        claim_all()


def test_a_rank_that_does_not_arrive_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claim_ports()
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    environment |= {"MASTER_PORT": str(claim.port), "LOCAL_RANK": "0", RECORDER_VARIABLE: "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^rank 1 cannot reach the rendezvous at localhost:{claim.port}: "):
        rendezvous(datetime.timedelta(seconds=1))
