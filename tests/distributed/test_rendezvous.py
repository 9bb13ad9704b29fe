"""Networks of the sockets of ranks; what a rank says that does not arrive."""

import datetime

import pytest

from grpo_mp.distributed.ports import claim_ports
from grpo_mp.distributed.rendezvous import RECORDER_VARIABLE, rendezvous
from grpo_mp.utils.errors import UserError


def test_a_rank_that_does_not_arrive_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = claim_ports()
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    environment |= {"MASTER_PORT": str(claim.port), "LOCAL_RANK": "0", RECORDER_VARIABLE: "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=rf"^rank 1 cannot reach the rendezvous at localhost:{claim.port}: "):
        rendezvous(datetime.timedelta(seconds=1))
