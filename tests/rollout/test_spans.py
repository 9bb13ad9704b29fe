"""An engine of two tensor-parallel ranks: in one process tree, and in two that stand for two nodes."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest
import torch

from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from tests.rollout.conftest import REQUEST_TIMEOUT_S, START_TIMEOUT_S, Logprobs

SEQUENCE = tuple(range(5, 25))
pytestmark = pytest.mark.slow


def score(engine: EngineProcess) -> list[float]:
    async def request() -> list[list[float]]:
        async with aclosing(EngineClient(engine.spec.index, engine.url, engine.headers, REQUEST_TIMEOUT_S)) as client:
            return await client.score([SEQUENCE])

    return asyncio.run(request())[0]


def test_an_engine_over_two_nodes(
    make_spec: Callable[..., EngineSpec], model_folder: Path, expected_logprobs: Logprobs, tmp_path: Path
) -> None:
    nodes = [make_spec(gpus=2, nodes=2, node_rank=node) for node in (0, 1)]
    first, second = (EngineProcess(spec, tmp_path / f"node_{spec.node_rank}.log") for spec in nodes)
    with ExitStack() as stack:
        stack.callback(first.stop)
        stack.callback(second.stop)
        dist_init_addr = first.start(host="127.0.0.1")
        assert second.start(dist_init_addr=dist_init_addr) == dist_init_addr
        first.wait_ready(START_TIMEOUT_S)
        computed = torch.tensor(score(first))
    table = expected_logprobs(model_folder, list(SEQUENCE))[:-1]
    expected = table.gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0]
    assert computed.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
