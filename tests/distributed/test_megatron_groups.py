"""Two sets of Megatron's groups in one process: one is in use at a time, and neither learns of the other."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed import megatron_groups
from grpo_mp.distributed.process_groups import Parallel, make_parallel, replica_groups
from tests.one_rank import one_rank_job


def made_beside(parallel: Parallel) -> Parallel:
    return make_parallel(parallel.job, LayoutConfig(), seed=7, timeout_s=60.0)


def groups() -> dict[str, object]:
    return {name: value for name, value in vars(parallel_state).items() if isinstance(value, dist.ProcessGroup)}


def states() -> dict[str, torch.Tensor]:
    tracked: dict[str, torch.Tensor] = get_cuda_rng_tracker().get_states()
    return tracked


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_groups_are_in_use_inside_and_put_back_behind() -> None:
    with one_rank_job() as first:
        own, own_states, scratch = groups(), states(), parallel_state.get_global_memory_buffer()
        count = len(parallel_state._global_process_group_list)
        second = made_beside(first)
        assert groups() == own
        assert same(states(), own_states)
        assert len(parallel_state._global_process_group_list) > count
        with second.in_use():
            inside = groups()
            assert inside.keys() == own.keys()
            assert not set(inside.values()) & set(own.values())
            assert not same(states(), own_states)
            assert parallel_state.get_global_memory_buffer() is scratch
            assert len(parallel_state._global_process_group_list) > count
            with first.in_use():
                assert groups() == own
            with second.in_use():
                assert groups() == inside
        assert groups() == own
        assert same(states(), own_states)
        assert parallel_state.get_global_memory_buffer() is scratch
        assert replica_groups(first) != replica_groups(second)
        with pytest.raises(ZeroDivisionError), second.in_use():
            _ = 1 / 0
        assert groups() == own


def test_what_a_pass_leaves_belongs_to_its_layout() -> None:
    """The virtual stage that a schedule has come to, drawn numbers, and losses of routers, by layer of one model."""
    with one_rank_job() as first:
        second = made_beside(first)
        (place,) = (place for place in megatron_groups._read() if place[1].endswith("_TRACKER"))
        before = megatron_groups._read()[place]
        with second.in_use():
            parallel_state.set_virtual_pipeline_model_parallel_rank(1)
            megatron_groups._write({place: {"loss": {"values": torch.zeros(3)}}})
            get_cuda_rng_tracker().states_["model-parallel-rng"] = torch.zeros(16, dtype=torch.uint8)
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() is None
        assert megatron_groups._read()[place] is before
        assert states()["model-parallel-rng"].any()
        with second.in_use():
            assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
            assert megatron_groups._read()[place].keys() == {"loss"}
            assert not states()["model-parallel-rng"].any()


def test_all_that_megatron_keeps_of_a_layout_is_known() -> None:
    """Megatron's own destroy_model_parallel names it: what it resets is what is exchanged."""
    with one_rank_job():
        before = dict(vars(parallel_state))
        kept = {name for _, name in megatron_groups._read()} | megatron_groups.SHARED
        parallel_state.destroy_model_parallel()
        reset = {name for name, value in before.items() if vars(parallel_state)[name] is not value}
    assert reset - {"_global_process_group_list"} <= kept
    assert len(reset) > 20
