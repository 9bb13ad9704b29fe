"""The examples of the page on episodes: code and settings, by heading."""

import re
from pathlib import Path
from typing import Any

import yaml

import grpo_mp

PAGE = (Path(grpo_mp.__file__).parent / "rollout" / "README.md").read_text()
HEADINGS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


def read_example(heading: str, folder: Path) -> dict[str, Any]:
    """Write the files of a section into a folder; return its settings."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for code in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        (folder / re.findall(r"^# (\w+\.py)$", code, re.MULTILINE)[0]).write_text(code)
    (settings,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    tree: dict[str, Any] = yaml.safe_load(settings)
    return tree
