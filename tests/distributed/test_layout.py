"""Each rule's sentence; and over all small layouts: what is valid, and which valid one is nearest."""

from itertools import product
from typing import Any

import pytest

from grpo_mp.config import Layout
from grpo_mp.distributed.layout import ModelShape, broken_rules, check_layout, describe, nearest_layout
from grpo_mp.errors import UserError

SPARSE = ModelShape(layers=4, attention_heads=4, query_groups=2, ffn_widths=(12,), experts=6, expert_width=4)
DENSE = ModelShape(layers=6, attention_heads=6, query_groups=6, ffn_widths=(12, 18))
NAMES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")


def all_layouts(largest: int, layers: int) -> list[Layout]:
    sizes = range(1, largest + 1)
    chunks = (None, *range(2, layers + 1))
    return [
        Layout(**dict(zip(NAMES, values, strict=True))) for values in product(sizes, sizes, chunks, sizes, sizes, sizes)
    ]


def fits(layout: Layout, model: ModelShape, world_size: int) -> bool:
    """In terms of what each rank would hold: equal whole shares of everything."""
    chunks = layout.virtual_pipeline or 1
    shares = [
        world_size / (layout.tensor * layout.context * layout.pipeline),
        world_size / (layout.expert * layout.expert_tensor * layout.pipeline),
        model.layers / (layout.pipeline * chunks),
        *(part / layout.tensor for part in (model.attention_heads, model.query_groups, *model.ffn_widths)),
    ]
    if model.experts:
        shares += [model.experts / layout.expert, model.expert_width / layout.expert_tensor]
    elif layout.expert * layout.expert_tensor > 1:
        return False
    return all(share == int(share) for share in shares) and (chunks == 1 or layout.pipeline > 1)


def factors(one: Layout, other: Layout) -> float:
    pairs = zip(one.model_dump().values(), other.model_dump().values(), strict=True)
    return sum(max(a or 1, b or 1) / min(a or 1, b or 1) for a, b in pairs)


@pytest.mark.parametrize("model", [SPARSE, DENSE])
@pytest.mark.parametrize("world_size", [1, 4, 6])
def test_valid_is_what_divides_and_nearest_is_the_best_of_the_valid(model: ModelShape, world_size: int) -> None:
    layouts = all_layouts(4, model.layers)
    valid = [layout for layout in layouts if fits(layout, model, world_size)]
    found = [layout for layout in layouts if next(broken_rules(layout, model, world_size), None) is None]
    assert found == valid
    for wanted in (*valid[::7], *layouts[3 :: len(layouts) // 25]):
        near = nearest_layout(wanted, model, world_size)
        assert near is not None
        assert fits(near, model, world_size)
        assert factors(near, wanted) <= min(factors(other, wanted) for other in valid)
        assert (near == wanted) == (wanted in valid)


@pytest.mark.parametrize(
    ("sizes", "model", "sentence"),
    [
        ({"tensor": 3}, SPARSE, "tensor x context x pipeline = 3 does not divide the 8 ranks"),
        ({"tensor": 2, "context": 8}, SPARSE, "tensor x context x pipeline = 16 does not divide the 8 ranks"),
        ({"expert": 3}, SPARSE, "expert_tensor x expert x pipeline = 3 does not divide the 8 ranks"),
        ({"tensor": 8}, SPARSE, "tensor=8 does not divide the 4 attention heads"),
        ({"tensor": 4}, SPARSE, "tensor=4 does not divide the 2 query groups"),
        ({"tensor": 4}, ModelShape(4, 4, 4, (6,)), "tensor=4 does not divide the MLP width 6"),
        ({"pipeline": 8}, SPARSE, "pipeline x virtual_pipeline = 8 does not divide the 4 layers"),
        (
            {"pipeline": 2, "virtual_pipeline": 3},
            SPARSE,
            "pipeline x virtual_pipeline = 6 does not divide the 4 layers",
        ),
        ({"virtual_pipeline": 2}, SPARSE, "virtual_pipeline needs pipeline > 1"),
        ({"expert": 2}, DENSE, "expert and expert_tensor must be 1: the model has no experts"),
        ({"expert": 4}, SPARSE, "expert=4 does not divide the 6 experts"),
        ({"expert_tensor": 8}, SPARSE, "expert_tensor=8 does not divide the expert width 4"),
    ],
)
def test_each_rule_has_its_sentence(sizes: dict[str, Any], model: ModelShape, sentence: str) -> None:
    layout = Layout(**sizes)
    assert sentence in list(broken_rules(layout, model, 8))
    with pytest.raises(UserError, match=r"^layout: .*; the nearest valid layout is tensor=\d, .*expert_tensor=\d$"):
        check_layout(layout, model, 8)


def test_the_first_broken_rule_and_the_nearest_layout_are_named() -> None:
    with pytest.raises(UserError) as caught:
        check_layout(Layout(tensor=4, pipeline=2, virtual_pipeline=3), SPARSE, 8)
    assert str(caught.value) == (
        "layout: tensor=4 does not divide the 2 query groups; the nearest valid layout is "
        "tensor=2, pipeline=2, virtual_pipeline=2, context=1, expert=1, expert_tensor=1"
    )


def test_layers_that_megatron_places_need_not_divide() -> None:
    layout = Layout(pipeline=8)
    check_layout(layout, SPARSE, 8, uneven_pipeline=True)
    with pytest.raises(UserError, match="does not divide the 4 layers"):
        check_layout(layout, SPARSE, 8)


def test_a_valid_layout_passes_and_is_described_as_in_the_settings_file() -> None:
    layout = Layout(tensor=2, pipeline=2, virtual_pipeline=2, expert=2, expert_tensor=2)
    check_layout(layout, SPARSE, 8)
    assert describe(layout) == "tensor=2, pipeline=2, virtual_pipeline=2, context=1, expert=2, expert_tensor=2"
    assert describe(Layout()) == "tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1"
