"""What the choice of cases promises: every two sizes meet, the table of layouts holds, newcomers see every measure."""

import re
from pathlib import Path

import pytest

from tests.parallel.cases import CASES, COMPARED, FAMILY_LAYOUTS, KINDS, LAYOUTS, LOADING, SWEPT, USUAL, cases_with
from tests.parallel.cover import pairwise_cover

LAYOUTS_PAGE = Path(__file__).parents[2] / "grpo_mp" / "docs" / "scaling.md"
Sizes = dict[str, int]


def all_sizes(layout: str) -> Sizes:
    ranks, sizes = LAYOUTS[layout]
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    values = dict.fromkeys(names, 1) | sizes
    return values | {"data": ranks // values["tensor"] // values["pipeline"] // values["context"]}


def sizes_meet(layouts: set[str], one: tuple[str, int], other: tuple[str, int]) -> bool:
    return any(all_sizes(layout)[one[0]] == one[1] and all_sizes(layout)[other[0]] == other[1] for layout in layouts)


def uncovered_pairs(possible: set[str], chosen: set[str]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """Every two sizes that meet in a possible layout and in none of the chosen."""
    values = {size for layout in possible for size in all_sizes(layout).items()}
    pairs = ((one, other) for one in values for other in values if one[0] < other[0])
    return {pair for pair in pairs if sizes_meet(possible, *pair) and not sizes_meet(chosen, *pair)}


@pytest.mark.parametrize("measure", USUAL)
@pytest.mark.parametrize("model", [*SWEPT, "qwen3_moe"])
def test_every_two_sizes_meet_in_a_case(model: str, measure: str) -> None:
    possible = set(SWEPT.get(model, LAYOUTS))
    if measure == "logits":  # a pipeline passes them on
        possible = {layout for layout in possible if "pp2" not in layout}
    chosen = {case.layout for case in cases_with(measure) if case.model == model and not case.variant}
    assert chosen <= possible
    assert not uncovered_pairs(possible, chosen)


def test_every_two_sizes_meet_in_algorithm_and_checkpoint_cases() -> None:
    assert not uncovered_pairs(set(FAMILY_LAYOUTS), {case.layout for case in cases_with("family")})
    loading = {"one", "tp2", "pp2", "pp2_vpp2", "ep2", "tp2_pp2", "ep2_pp2"}
    assert not uncovered_pairs(loading, set(LOADING["deepseek_v3-tp2_ep2_pp2"]))


def test_a_cover_is_smaller_than_what_it_covers() -> None:
    halves = {f"{a}{b}{c}": {(0, 1, a, b), (0, 2, a, c), (1, 2, b, c)} for a in "01" for b in "01" for c in "01"}
    pairs = {name: frozenset(some) for name, some in halves.items()}  # type: ignore[arg-type]
    chosen = pairwise_cover(pairs, keep=["111"])  # type: ignore[arg-type]
    assert "111" in chosen
    assert 4 <= len(chosen) <= 6
    assert set().union(*(halves[name] for name in chosen)) == set().union(*halves.values())


def layouts_of_readme() -> list[tuple[int, Sizes]]:
    """Ranks and sizes larger than 1 of the table under `Layouts`."""
    table = LAYOUTS_PAGE.read_text().partition("## Layouts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d) \| (.+) \|$", table, re.MULTILINE)
    sizes = re.compile(r"(tensor|pipeline|virtual|context|expert-tensor|expert|data) (\d)")
    names = ((int(ranks), name) for ranks, row in rows for name in row.split("; "))
    return [(ranks, {size: int(value) for size, value in sizes.findall(name)}) for ranks, name in names]


@pytest.mark.parametrize(("ranks", "sizes"), layouts_of_readme(), ids=str)
def test_readme_layouts_are_compared_with_transformers_and_one_rank(ranks: int, sizes: Sizes) -> None:
    renamed = {"virtual": "virtual_pipeline", "expert-tensor": "expert_tensor"}
    expected = {renamed.get(name, name): size for name, size in sizes.items() if name != "data"}
    (layout,) = (name for name, each in LAYOUTS.items() if each == (ranks, expected))
    assert sizes.get("data", all_sizes(layout)["data"]) == all_sizes(layout)["data"]
    cases = [case for case in CASES.values() if case.layout == layout]
    measured = {measure for case in cases for measure in case.measures}
    assert {"gradient", "updates", "logprobs" if "pipeline" in sizes else "logits"} <= measured
    assert ranks > 1 or {"selective", "full"} <= {case.variant for case in cases}


def test_every_model_is_compared_with_transformers_and_split() -> None:
    for model in COMPARED:
        cases = [case for case in cases_with("logprobs") if case.model == model]
        assert {case.ranks > 1 for case in cases} == {False, True}


def test_newcomers_see_every_measure_and_every_layout_of_two_ranks() -> None:
    cases = [case for case in CASES.values() if not case.slow]
    assert {measure for case in cases for measure in case.measures} == {
        measure for case in CASES.values() for measure in case.measures
    }
    for measure in ("export", "logprobs", "gradient", "updates"):
        layouts = {case.layout for case in cases if measure in case.measures}
        assert layouts == {name for name, (ranks, _) in LAYOUTS.items() if ranks <= 2}
        assert {case.model for case in cases if measure in case.measures} == set(KINDS)
