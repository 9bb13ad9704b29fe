"""The settings of the page on episodes are accepted."""

from pathlib import Path

import pytest

from grpo_mp.config import check_settings
from tests.episode_page import HEADINGS, PAGE, read_example
from tests.minimal_settings import MINIMAL_SETTINGS

WITH_SETTINGS = [
    heading for heading in HEADINGS if "```yaml" in PAGE.partition(f"\n## {heading}\n")[2].split("\n## ")[0]
]


@pytest.mark.parametrize("heading", WITH_SETTINGS)
def test_settings_of_the_page_are_accepted(heading: str, tmp_path: Path) -> None:
    tree = read_example(heading, tmp_path)
    sections = {name: MINIMAL_SETTINGS.get(name, {}) | values for name, values in tree.items()}
    settings = check_settings(MINIMAL_SETTINGS | sections, "page.yaml")
    assert settings.rollout.rollout_function


def test_each_example_is_read() -> None:
    assert len(WITH_SETTINGS) == PAGE.count("```yaml") == 11
