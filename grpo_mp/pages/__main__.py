"""Write the pages into the repository: `python -m grpo_mp.pages`."""

from pathlib import Path

from grpo_mp.pages import algorithms, metrics, settings

ROOT = Path(__file__).parents[2]
PAGES = {
    "configs/README.md": settings.page,
    "grpo_mp/algorithms/README.md": algorithms.page,
    "grpo_mp/monitor/README.md": metrics.page,
}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (ROOT / file).write_text(page(), encoding="utf-8")
