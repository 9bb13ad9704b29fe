"""Ports against the real kernel, from one process and from several."""

import socket
import subprocess
import sys

import psutil
import pytest

from grpo_mp.errors import UserError
from grpo_mp.rollout import ports
from grpo_mp.rollout.ports import claim_port, own_address

CLAIM = """
import sys
from grpo_mp.rollout import ports
ports.FIRST_PORT = int(sys.argv[1])
ports._last_port = lambda: ports.FIRST_PORT
ports.claim_port()
"""


def one_port_left(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let there be a single port to choose from: one that is free now."""
    port = claim_port_and_release()
    monkeypatch.setattr(ports, "FIRST_PORT", port)
    monkeypatch.setattr(ports, "_last_port", lambda: port)
    return port


def claim_port_and_release() -> int:
    claim = claim_port()
    claim.release()
    return claim.port


def test_claims_differ_and_can_be_bound() -> None:
    claims = [claim_port() for _ in range(50)]
    assert len({claim.port for claim in claims}) == 50
    for claim in claims:
        with socket.create_server(("127.0.0.1", claim.port)):
            claim.release()


def test_a_claimed_port_is_not_chosen_again_until_released(monkeypatch: pytest.MonkeyPatch) -> None:
    port = one_port_left(monkeypatch)
    claim = claim_port()
    assert claim.port == port
    with pytest.raises(UserError, match=f"no free port between {port} and {port}"):
        claim_port()
    claim.release()
    claim_port().release()


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    port = one_port_left(monkeypatch)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UserError, match="no free port"):
        claim_port()


def test_another_process_sees_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    port = one_port_left(monkeypatch)
    command = [sys.executable, "-c", CLAIM, str(port)]
    claim = claim_port()
    assert b"no free port" in subprocess.run(command, capture_output=True, timeout=300).stderr
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
