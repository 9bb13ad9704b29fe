"""What of rollouts with tools and environments is refused at the start, in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config import load_settings
from grpo_mp.data.prompts import load_train_prompts
from grpo_mp.rollout.episodes import EpisodeParts, load_episode_parts
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Prompt
from tests.conftest import TinyRun
from tools.tiny.models import make_tokenizer

PARTS = '''
class Game:
    def move(self, to: int) -> str:
        """
        Move.

        Args:
            to: where
        """
        return ""

class Shop:
    def buy(self) -> str:
        """Buy."""
        return ""

def open_shop():
    return Shop()
'''
Parts = Callable[..., EpisodeParts]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path / "parts.py"


@pytest.fixture
def load(tiny_run: TinyRun, file: Path) -> Callable[..., Any]:
    """Settings over those of the tiny run, and the parts that they name."""

    def make(*overrides: str) -> Any:
        settings = load_settings(tiny_run.config, ["rollout.tool_parser=qwen25", *overrides])
        tokenizer = make_tokenizer(["?", *"abcdefghijklmnopqrstuvwxyz"])
        tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + str(tokenizer.chat_template)
        parts = load_episode_parts(settings.rollout, tokenizer)
        assert parts
        return settings, parts

    return make


def test_each_row_names_an_environment(load: Callable[..., Any], file: Path, tmp_path: Path) -> None:
    """Its prompt shows the tools of that one alone, as TRL's does; another name is refused with its line."""
    factories = f"rollout.environment_factory={{game: '{file}:Game', shop: '{file}:open_shop'}}"
    data = tmp_path / "rows.jsonl"

    def prompts(*rows: dict[str, Any]) -> tuple[EpisodeParts, list[Prompt]]:
        data.write_text("".join(json.dumps({"question": "?", "answer": "1", **row}) + "\n" for row in rows))
        settings, parts = load(factories, f"data.train={data}")
        return parts, [*load_train_prompts(settings.data, parts.renderer.tokenizer, 2000, parts.schemas_of)]

    parts, (game, shop) = prompts({"environment": "game"}, {"environment": "shop"})
    for prompt, shown, hidden in ((game, "move", "buy"), (shop, "buy", "move")):
        own = parts.of(prompt.columns, "")
        assert [kind.tools for kind in own.tools.classes] == [(shown,)]
        assert own.renderer.prompt(prompt.messages) == prompt.tokens
        text = own.renderer.render(prompt.messages, asks=True)
        assert (f'"name": "{shown}"' in text, hidden in text) == (True, False)
    assert game.tokens != shop.tokens
    known = "of rollout.environment_factory{}: there are game, shop"
    for columns, message in (
        ({"environment": "gmae"}, "column environment: 'gmae' is none " + known.format(" (did you mean game?)")),
        ({"environment": ["game"]}, "column environment: ['game'] is none " + known.format("")),
        ({}, "column environment: is missing, a name " + known.format("")),
    ):
        with pytest.raises(UserError) as refused:
            prompts({"environment": "game"}, columns)
        assert str(refused.value) == f"{data}, line 2: {message}"
