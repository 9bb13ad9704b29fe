"""Which function moves what at the start of a phase."""

import asyncio
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from grpo_mp.distributed.nccl_memory import NcclMemory
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.trainer.offload import offload_functions
from grpo_mp.utils.errors import EngineError
from tests.policy.test_checkpoint import make_policy

NO_ENGINE = cast(Rollout, SimpleNamespace(client=None, losing_engine=nullcontext, reward_servers=None))


def test_ranks_meet_before_communicators_are_suspended(parallel: Parallel, tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[object] = []
    monkeypatch.setattr(dist, "barrier", lambda group: calls.append(group))
    memory = cast(NcclMemory, SimpleNamespace(move=calls.append))
    functions = offload_functions(make_policy(tmp_path, parallel), NO_ENGINE, True, memory)
    for onload in (False, True):
        functions["communicators"](onload)
    assert calls == [parallel.cpu_group, False, parallel.cpu_group, True]


@pytest.mark.parametrize("onload", [True, False])
def test_an_engine_that_fails_to_sleep_or_wake_is_given_up(parallel: Parallel, tmp_path: Path, onload: bool) -> None:
    """As one that has no memory: it starts again, and the sentence says what to lower."""

    async def fail(tags: tuple[str, ...]) -> None:
        raise EngineError("engine 2: /resume_memory_occupation: CUDA out of memory")

    lost = list[EngineError]()
    client = SimpleNamespace(release_memory=fail, resume_memory=fail)
    rollout: Any = SimpleNamespace(client=client, lose_engine=lost.append, call=asyncio.run, reward_servers=None)
    rollout.losing_engine = partial(Rollout.losing_engine, rollout)
    functions = offload_functions(make_policy(tmp_path, parallel), rollout, True, communicators=None)
    functions["engine_weights"](onload)
    (error,) = lost
    assert str(error).startswith("engine 2: /resume_memory_occupation: CUDA out of memory: where it ran out")
