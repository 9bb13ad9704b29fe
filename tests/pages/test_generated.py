"""Generated pages are up to date, and the page of the settings names every one of them."""

import re

import pytest

from grpo_mp.config import Settings, SftSettings
from grpo_mp.models.families import FAMILIES
from tools.family_table import COLUMNS, family_rows
from tools.write_pages import PAGES, ROOT, table


@pytest.mark.parametrize("file", PAGES)
def test_a_page_is_up_to_date(file: str) -> None:
    page = PAGES[file]()
    assert (ROOT / file).read_text(encoding="utf-8") == page, "run python -m tools.write_pages"
    assert not re.search(r"<!-- begin (\w+) -->\s*<!-- end", page), "a place that nothing filled"


def test_every_setting_stands_on_its_page() -> None:
    """Against the JSON schema, which pydantic makes of the same types."""
    schemas = [root.model_json_schema() for root in (Settings, SftSettings)]
    sections = [section for schema in schemas for section in (schema, *schema["$defs"].values())]
    page = PAGES["configs/README.md"]()
    rows = {(row[1], row[2]) for row in re.finditer(r"^\| `(\w+)` \|.*\| (.+) \|$", page, re.MULTILINE)}
    missing = [
        name
        for section in sections
        for name, setting in section.get("properties", {}).items()
        if (name, setting["description"].replace("|", "\\|")) not in rows
    ]
    assert not missing


def test_types_limits_and_defaults_of_some_settings() -> None:
    page = PAGES["configs/README.md"]()
    for row in (
        "| `group_size` | integer, > 0 | required |",
        "| `dtype` | `float32`, `bfloat16`, `float16` | `null` |",
        "| `betas` | list of number, 2 of them | `[0.9, 0.98]` |",
        "| `virtual_pipeline` | integer or null, >= 2 | `null` |",
        "| `functions` | mapping of names to number | `{}` |",
        "| `on_error` | `stop`, `skip` or number | `stop` |",
        "| `kl` | section |  |",
    ):
        assert row in page
    assert page.index("## algorithm.kl\n") < page.index("| `coef` |") < page.index("## algorithm.entropy\n")
    assert "## data.eval.NAME\n" in page


def test_every_family_of_the_table_was_computed_on_several_ranks_and_loaded_by_engines() -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in family_rows()]
    assert [row["model_type"] for row in rows] == [f"`{name}`" for name in FAMILIES]
    for row in rows:
        assert {"one"} < set(row["layouts"].split(", ")), row
        assert "tensor" in row["engine"], row
        assert row["models"], row
        assert row["architecture"] == FAMILIES[row["model_type"].strip("`")].architecture


def test_a_table_keeps_bars_in_its_cells() -> None:
    assert table(("a", "b"), [("x|y", "z")]) == "| a | b |\n|---|---|\n| x\\|y | z |\n"
