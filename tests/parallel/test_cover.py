"""What the choice of cases promises: the table of layouts holds, newcomers see every measure."""

import re
from pathlib import Path

import pytest

from tests.parallel.cases import CASES, COMPARED, KINDS, LAYOUTS, cases_with

LAYOUTS_PAGE = Path(__file__).parents[2] / "grpo_mp" / "docs" / "scaling.md"
Sizes = dict[str, int]


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
    # Newcomers' megatron-core may have no sparse attention.
    assert {measure for case in cases for measure in case.measures} == {
        measure for case in CASES.values() for measure in case.measures
    } - {"indexers"}
    for measure in ("export", "logprobs", "gradient", "updates"):
        layouts = {case.layout for case in cases if measure in case.measures}
        assert layouts == {name for name, (ranks, _) in LAYOUTS.items() if ranks <= 2}
        assert {case.model for case in cases if measure in case.measures} == set(KINDS)
