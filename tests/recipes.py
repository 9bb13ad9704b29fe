"""The settings files of configs/, by what they are of."""

from pathlib import Path

import yaml

CONFIGS = Path(__file__).parents[1] / "configs"
SECTIONS = {path: set(yaml.safe_load(path.read_text())) for path in sorted(CONFIGS.glob("*.yaml"))}
PIPELINES = [path for path, sections in SECTIONS.items() if "stages" in sections]
SFT = [path for path, sections in SECTIONS.items() if "sft" in sections]
RL = [path for path in SECTIONS if path not in (*PIPELINES, *SFT)]
FULL_SIZE = [path for path in RL if not path.stem.startswith("tiny")]
