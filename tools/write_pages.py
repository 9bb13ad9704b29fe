"""Generate tables from the code and write them between the marks of Markdown pages: `python -m tools.write_pages`."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.config import Settings, SftSettings
from grpo_mp.config.other_trainers import TRAINERS, read_tables
from grpo_mp.monitor.metrics import TABLE, Metric
from grpo_mp.monitor.rules import RULES, Rule
from grpo_mp.utils.section import Section, nested_sections, section_type

ROOT = Path(__file__).parents[1]
CHANCES = (0.01, 0.1, 0.3, 0.5)
GROUP_SIZES = {
    2: "Samples are expensive, p is near 0.5: 98 % of what 16 reached, by an eighth of them (2-GRPO, arXiv 2510.00977)",
    4: "A first try, an expensive judge, answers of many thousand tokens",
    8: "The usual start, and TRL's default",
    16: "Long reasoning on problems of mixed difficulty: DAPO and R1",
    32: "Most groups of 16 are all wrong (reward/zero_std_ratio above 0.8 with a low reward)",
    64: "Problems solved once in fifty: DeepSeekMath; pass@64 before training shows if they are solved",
}
METRIC_COLUMNS = ("name", "unit", "meaning", "healthy", "known as")
RULE_COLUMNS = ("rule", "weight", "meaning", "what to try")
SETTING_COLUMNS = ("setting", "type", "default", "description")
TYPE_NAMES = {
    int: "integer",
    ByteSize: "bytes",
    float: "number",
    str: "text",
    Path: "path",
    bool: "`true`, `false`",
    Any: "any",
    NoneType: "null",
}
LIMITS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


def fill(page: str, **parts: str) -> str:
    """Return the text of a page with each part inserted between `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, part in parts.items():
        begin = f"<!-- begin {name} -->\n"
        end = f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{part.strip()}\n\n{end}{after}"
    return text


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; every line ends with a newline."""
    head = tuple(head)
    return _line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(_line, rows))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def algorithms_page() -> str:
    """Return the README of the algorithms with its tables of presets and group sizes."""
    presets = (
        (f"`{name}`", preset.source, ", ".join(_constants(preset.settings)) or "the defaults")
        for name, preset in PRESETS.items()
    )
    return fill(
        "grpo_mp/algorithms/README.md",
        uses=table(("preset", "use it when"), ((f"`{name}`", preset.use) for name, preset in PRESETS.items())),
        group_sizes=_group_sizes(),
        presets=table(("preset", "source", "constants that differ from the defaults"), presets),
    )


def _group_sizes() -> str:
    """Return the table of group sizes G with the expected share of informative groups.

    A group is informative if it has right and wrong answers: 1 - p^G - (1 - p)^G for the solve rate p. The column
    "variance" is G / (G - 1).
    """
    chances = [f"p = {p:g}" for p in CHANCES]
    rows = (
        (str(size), *(f"{1 - p**size - (1 - p) ** size:.0%}" for p in CHANCES), f"{size / (size - 1):.2f}", f"{use}.")
        for size, use in GROUP_SIZES.items()
    )
    return table(("G", f"informative groups at {chances[0]}", *chances[1:], "variance", "use it when"), rows)


def _constants(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `section.key=value` for every leaf of a tree of settings."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from _constants(value, name)
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            yield f"`{name.removeprefix('algorithm.')}={shown}`"


def metrics_page() -> str:
    """Return the README of the monitor with its tables of metrics and rules."""
    groups = dict.fromkeys(metric.group for metric in TABLE)
    tables = (
        f"### {group}/\n\n{table(METRIC_COLUMNS, [_metric_cells(metric) for metric in TABLE if metric.group == group])}"
        for group in groups
    )
    return fill(
        "grpo_mp/monitor/README.md", metrics="\n".join(tables), rules=table(RULE_COLUMNS, map(_rule_cells, RULES))
    )


def _rule_cells(rule: Rule) -> tuple[str, ...]:
    return f"`{rule.name}`", str(rule.weight), rule.meaning, f"{rule.action} `{rule.setting}`"


def _metric_cells(metric: Metric) -> tuple[str, ...]:
    unit = metric.unit if metric.kind == "scalar" else f"{metric.unit} ({metric.kind})"
    return f"`{metric.name}`", unit, metric.meaning, metric.healthy, metric.known_as


def settings_page() -> str:
    """Return the README of the configs with its tables of settings."""
    of_rl = list(nested_sections(Settings))
    shared = [section for _, section in of_rl]
    own = [(path, section) for path, section in nested_sections(SftSettings) if section not in shared]
    return fill(
        "configs/README.md",
        settings="\n".join(_section(path, section) for path, section in of_rl),
        sft="\n".join(_section(f"{path or 'Sections'} of grpo-mp sft", section) for path, section in own),
    )


def coming_from_page() -> str:
    """Return the page that maps the settings of other trainers to the settings of this package."""
    tables = {}
    for title, rows in read_tables().items():
        shown = [name for name in TRAINERS if any(name in row for row in rows)]
        part = re.sub(r"\W+", "_", title.lower())
        tables[part] = table(("here", *shown), ((row["here"], *(row.get(name, "") for name in shown)) for row in rows))
    return fill("configs/COMING_FROM.md", **tables)


def models_page() -> str:
    """Return the README of the models with its table of families."""
    from tools.family_table import COLUMNS, family_rows  # imports the tests, which is slow

    return fill("grpo_mp/models/README.md", families=table(COLUMNS, family_rows()))


def _section(path: str, section: type[Section]) -> str:
    rows = (_setting_cells(name, field) for name, field in section.model_fields.items())
    return f"## {path or 'Sections'}\n\n{section.__doc__}\n\n{table(SETTING_COLUMNS, rows)}"


def _setting_cells(name: str, field: FieldInfo) -> tuple[str, ...]:
    limits = [
        f"{sign} {getattr(item, attribute):g}"
        for item in field.metadata
        for kind, attribute, sign in LIMITS
        if isinstance(item, kind)
    ]
    return f"`{name}`", ", ".join([_type(field.annotation), *limits]), _default(field), field.description or ""


def _type(annotation: Any) -> str:
    """Describe the type of a setting in words; a Literal by its values, a section as "section"."""
    items = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{item}`" for item in items)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(item) for item in items)
    if get_origin(annotation) is Annotated:
        return _type(items[0])
    if get_origin(annotation) is dict:
        return f"mapping of names to {_type(items[1])}"
    if get_origin(annotation) is tuple:
        return f"list of {_type(items[0])}" + ("" if Ellipsis in items else f", {len(items)} of them")
    return "section" if section_type(annotation) else TYPE_NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(value, Section):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) and not value.strip() else str(value)


PAGES = {
    "configs/COMING_FROM.md": coming_from_page,
    "configs/README.md": settings_page,
    "grpo_mp/algorithms/README.md": algorithms_page,
    "grpo_mp/models/README.md": models_page,
    "grpo_mp/monitor/README.md": metrics_page,
}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (ROOT / file).write_text(page(), encoding="utf-8")
