"""The page of the algorithms: presets with their constants, and what group sizes give."""

from collections.abc import Iterator
from typing import Any

from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.pages.markdown import fill, table

CHANCES = (0.01, 0.1, 0.3, 0.5)
GROUP_SIZES = {
    2: "Samples are dear and p is near 0.5: 98 % of what 16 reached, with an eighth of them (2-GRPO, arXiv 2510.00977)",
    4: "A first try, a judge that costs, answers of many thousand tokens",
    8: "The usual start, and TRL's default",
    16: "Long reasoning on problems of mixed difficulty: DAPO and R1",
    32: "Most groups of 16 are all wrong (reward/zero_std_ratio above 0.8 with a low reward)",
    64: "Problems solved once in fifty: DeepSeekMath; pass@64 before training says whether they are solved at all",
}


def page() -> str:
    """Return the page as Markdown."""
    presets = (
        (f"`{name}`", preset.source, ", ".join(_constants(preset.settings)) or "the defaults")
        for name, preset in PRESETS.items()
    )
    return fill(
        "algorithms",
        uses=table(("preset", "take it when"), ((f"`{name}`", preset.use) for name, preset in PRESETS.items())),
        group_sizes=_group_sizes(),
        presets=table(("preset", "source", "constants that differ from the defaults"), presets),
    )


def _group_sizes() -> str:
    """Return the table of group sizes with the computed shares of informative groups."""
    chances = [f"p = {p:g}" for p in CHANCES]
    rows = (
        (str(size), *(f"{1 - p**size - (1 - p) ** size:.0%}" for p in CHANCES), f"{size / (size - 1):.2f}", f"{use}.")
        for size, use in GROUP_SIZES.items()
    )
    return table(("G", f"informative groups at {chances[0]}", *chances[1:], "variance", "take it when"), rows)


def _constants(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `section.key=value` for every leaf of the tree."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from _constants(value, name)
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            yield f"`{name.removeprefix('algorithm.')}={shown}`"
