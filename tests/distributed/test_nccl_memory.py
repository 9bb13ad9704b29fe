"""Communicators that are suspended: Megatron's real groups in a fake process group, whose backends record the calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_mp.config import load_settings
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed import nccl_memory
from grpo_mp.distributed.coordinates import PIPELINE, Communicator, communicators
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.nccl_memory import NcclMemory, can_suspend
from grpo_mp.distributed.process_groups import megatron_sizes
from grpo_mp.planner.model_configs import find_config
from tests.policy.build_on_meta import COMMAND
from tests.recipes import RL

RECIPES = RL
GPUS_PER_NODE = 8


@contextmanager
def megatron_groups(layout: LayoutConfig, world_size: int, rank: int = 0) -> Iterator[list[Any]]:
    """Make the groups of one rank, as `start_parallel` does but for those of gloo."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(**megatron_sizes(layout), create_gloo_process_groups=False)
        yield [dist.group.WORLD, *parallel_state._global_process_group_list[1:]]
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def ranks_of(communicator: Communicator) -> list[int]:
    return list(range(0, communicator.ranks * communicator.stride, communicator.stride))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_counted_communicators_are_groups_of_megatron(recipe: Path) -> None:
    settings = load_settings(recipe)
    command = COMMAND.search(recipe.read_text())
    world_size = int(command[2]) * GPUS_PER_NODE if command else 4
    model = model_shape(find_config(settings.model.path)[0]) if command else None
    counted = communicators(settings.layout, world_size, bool(model and model.num_experts), tied=False)
    with megatron_groups(settings.layout, world_size) as groups:
        by_name = {group.group_desc: dist.get_process_group_ranks(group) for group in groups[1:]}
        by_name["WORLD"] = dist.get_process_group_ranks(groups[0])
        assert {group.group: ranks_of(group) for group in counted} == {
            group.group: by_name[group.group] for group in counted
        }
        # Most of what Megatron makes is never used: a group has no communicator until it is.
        made = sum(len(ranks) > 1 for ranks in by_name.values())
        assert len(counted) < made


class Backend:
    """Records what is asked of one group's communicator."""

    def __init__(self, name: str, calls: list[tuple[str, str]], used: bool) -> None:
        self.name = name
        self.calls = calls
        self.used = used

    def _is_initialized(self) -> bool:
        return self.used

    def suspend(self) -> None:
        self.calls.append(("suspend", self.name))

    def resume(self) -> None:
        self.calls.append(("resume", self.name))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What backends are asked for; groups whose name has DATA in it were never used."""
    calls: list[tuple[str, str]] = []

    def backend_of(group: dist.ProcessGroup, device: object) -> Backend:
        ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
        return Backend(f"{group.group_desc}:{ranks}", calls, used="DATA" not in group.group_desc)

    monkeypatch.setattr(nccl_memory.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", backend_of)
    return calls


def move(layout: LayoutConfig, world_size: int, rank: int) -> None:
    with megatron_groups(layout, world_size, rank):
        memory = NcclMemory(layout)
        for onload in (True, False, True, True):
            memory.move(onload)


def test_ranks_that_share_groups_suspend_them_in_the_same_order(calls: list[tuple[str, str]]) -> None:
    orders = []
    for rank in range(16):
        calls.clear()
        move(LayoutConfig(tensor=2, context=2, pipeline=2, expert=4), 16, rank)
        orders.append([name for what, name in calls if what == "suspend"])
    for one in orders:
        for other in orders:
            shared = set(one) & set(other)
            assert [name for name in one if name in shared] == [name for name in other if name in shared]
            assert shared


def test_pairs_of_a_virtual_pipeline_keep_their_communicators(calls: list[tuple[str, str]]) -> None:
    move(LayoutConfig(pipeline=2), 4, rank=0)
    assert any(name.startswith(PIPELINE) for _, name in calls)
    calls.clear()
    move(LayoutConfig(pipeline=2, virtual_pipeline=2), 4, rank=0)
    assert calls
    assert not any(name.startswith(PIPELINE) for _, name in calls)


def test_buffers_stay_with_an_older_nccl_or_its_former_allocator() -> None:
    assert can_suspend((2, 29, 7), {})
    assert not can_suspend((2, 27, 5), {})
    assert not can_suspend((2, 30, 7), {"NCCL_CUMEM_ENABLE": "0"})
    assert not can_suspend((2, 30, 7), {"TORCH_DIST_USE_NCCL2": "1"})
