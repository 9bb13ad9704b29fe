"""Fingerprints tell what changed; a sync of what changed leaves an engine with what a sync of all would."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import single_rank_environment, start_parallel, stop_parallel
from grpo_mp.models.fp8 import SCALE
from grpo_mp.weight_sync.changes import ChangeTracker, fingerprint, keep_changed, random_factors
from grpo_mp.weight_sync.plan import Piece, group_params
from grpo_mp.weight_sync.reshard import Resharder
from tests.weight_sync.test_plan import Case, all_cases, fp8_cases, plan_of, replay, resharders, wire_format

FACTORS = random_factors(64)  # several chunks in small tensors
CHANGED = ("linear_kv_down_proj.weight", "experts.linear_fc1.weight3", "router.expert_bias", "final_layernorm.weight")


def bits(tensor: Tensor) -> int:
    return fingerprint(tensor, FACTORS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (129, 33)])
def test_equal_tensors_and_only_they_have_equal_fingerprints(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert bits(tensor) == bits(tensor.clone())
    seen = {bits(tensor)}
    for place in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[place] = torch.nextafter(other.view(-1)[place].float(), torch.tensor(9e9)) * 2
        seen.add(bits(other))
    assert len(seen) == tensor.numel() + 1


def test_order_counts_within_a_word_between_words_and_between_chunks() -> None:
    tensor = torch.arange(64 * 4 * 3, dtype=torch.bfloat16)
    for one, other in ((0, 1), (0, 4), (3, 3 + 64 * 4), (5, -1)):
        swapped = tensor.clone()
        swapped[one], swapped[other] = tensor[other], tensor[one]
        assert bits(swapped) != bits(tensor)


def test_small_updates_that_cancel_in_sums_are_seen() -> None:
    """A bias of experts moves by the same step up and down, a weight by its last bit, in the same lane of each word."""
    generator, seen = torch.Generator().manual_seed(5), set()
    base = torch.ones(256, dtype=torch.bfloat16)
    for _ in range(20_000):
        lanes = base.view(torch.int16).clone()
        lanes[3::4] += torch.randint(-1, 2, (64,), generator=generator, dtype=torch.int16)
        seen.add(bits(lanes.view(torch.bfloat16)))
    assert len(seen) == 20_000


def test_a_view_has_the_fingerprint_of_its_copy() -> None:
    matrix = torch.randn(40, 30)
    assert bits(matrix.t()) == bits(matrix.t().clone()) != bits(matrix)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with single_rank_environment():
        yield start_parallel(LayoutConfig(), 0, 60.0).cpu_group
        stop_parallel()


def test_names_that_changed_since_the_last_call(group: dist.ProcessGroup) -> None:
    tensors = {name: torch.randn(3, 3) for name in "abc"}
    changes = ChangeTracker(tuple("abcd"), group)  # d is on no rank: not sent, never changed
    assert changes.take_changes(tensors) == set("abc")
    assert changes.take_changes(tensors) == set()
    assert changes.unchanged == set("abcd")
    tensors["b"][1, 1] += 1
    assert changes.take_changes(tensors) == {"b"}
    assert changes.unchanged == set("acd")
    changes.forget()
    assert changes.take_changes(tensors) == set("abc")


def some_cases() -> list[Case]:
    return [*all_cases()[::149], *fp8_cases()[::3]]


@pytest.mark.parametrize("case", some_cases(), ids=str)
def test_what_changed_and_nothing_else_is_sent(case: Case) -> None:
    wire, plan = wire_format(case), plan_of(case)
    before = resharders(case, plan)
    groups = group_params(wire.params)
    changed = {name for name in wire.params if name.endswith(CHANGED)}
    assert changed
    travels = {name for group in groups if changed & set(group.names) for name in group.names}
    after = [
        Resharder(
            keep_changed(rank.rounds, changed, groups),
            wire,
            {name: 2 * tensor if name in changed else tensor for name, tensor in rank.tensors.items()},
        )
        for rank in before
    ]
    for old, new in zip(replay(case, before), replay(case, after), strict=True):
        sent = {spec.name for name in travels for spec in wire.specs(Piece(name))}
        assert new.keys() == old.keys() & sent
        for name in changed:
            for spec in wire.specs(Piece(name)):
                if spec.name in new:  # doubled numbers have the same FP8 values and doubled scales
                    quantized = case.fp8 and wire.params[name].is_projection
                    factor = 1 if quantized and not spec.name.endswith(SCALE) else 2
                    assert torch.equal(new[spec.name].float(), factor * old[spec.name].float())


def test_without_a_change_no_round_is_left() -> None:
    case = all_cases()[0]
    rounds = plan_of(case).of_rank(0)
    assert len(rounds) > 1
    assert keep_changed(rounds, set(), group_params(wire_format(case).params)) == ()
