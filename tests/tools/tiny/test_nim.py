"""Nim against each opponent: who wins is known from the theory of the game."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.config.registries import ROLLOUT_FUNCTIONS
from grpo_mp.data.prompts import PromptReader, load_train_prompts
from grpo_mp.rollout.protocol import Episode, Segment, Task, Turn
from grpo_mp.rollout.tools import ToolKit
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message, Prompt
from tests.episode_page import PAGE, read_example
from tests.http_server import JsonServer, Reply, chat_reply
from tools.tiny.models import make_tokenizer
from tools.tiny.nim import Nim, read_move

Choose = Callable[[int], int]


@dataclass
class Scripted:
    """A policy that answers by a function of the stones in the last message."""

    choose: Choose
    asked: list[int] = field(default_factory=list)
    others: list["Scripted"] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    temperature = top_p = 1.0

    async def generate(
        self,
        messages: Sequence[Message] | None = None,
        tokens: Sequence[int] | None = None,
        max_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        role: str = "",
    ) -> Turn:
        assert messages
        self.roles.append(role)
        self.asked.append(int(str(messages[-1]["content"]).rpartition(" ")[2]))
        return Turn((1,), (-1.0,), (0,), f"I take {self.choose(self.asked[-1])}", True)

    def episode(self, reward: Any = None, metrics: Any = None, state: Any = None) -> Episode:
        return Episode((Segment((1,), True, (-1.0,), (0,)),), reward, metrics)

    def unrecorded(self) -> "Scripted":
        self.others.append(Scripted(self.choose))
        return self.others[-1]


def play(stones: int, policy: Scripted, opponent: str) -> Episode:
    prompt = Prompt(stones, "Nim", (1,), columns={"stones": stones})
    task = Task(prompt, 0, 1, asyncio.run(ToolKit().open(1.0, 1)), ())
    return asyncio.run(Nim(opponent)(task, policy))


def wins(stones: int, is_mine: bool = True) -> bool:
    """By search over all games: whether the side that moves can force a win."""
    return any(taken == stones or not wins(stones - taken) for taken in range(1, min(3, stones) + 1))


@pytest.mark.parametrize("stones", range(1, 14))
def test_a_perfect_opponent_loses_only_to_perfect_play_from_a_won_position(stones: int) -> None:
    best = Scripted(lambda left: next((n for n in (1, 2, 3) if n == left or (n < left and not wins(left - n))), 1))
    assert play(stones, best, "perfect").reward == wins(stones)
    assert play(stones, best, "self").reward == wins(stones)
    if stones > 4:
        assert play(stones, Scripted(lambda left: 1 if left % 4 != 1 else 2), "perfect").reward == 0.0


def test_both_sides_move_in_turn_in_roles_of_their_own() -> None:
    policy = Scripted(lambda left: 2 if left > 1 else 1)
    episode = play(7, policy, "second")
    assert (policy.asked, policy.roles) == ([7, 5, 3, 1], ["", "second"] * 2)
    assert episode.reward == 0.0


def test_both_sides_of_self_play_move_in_turn() -> None:
    policy = Scripted(lambda left: 2 if left > 1 else 1)
    episode = play(7, policy, "self")
    assert (policy.asked, policy.others[0].asked) == ([7, 3], [5, 1])
    assert (episode.reward, episode.metrics) == (0.0, {"won": False, "moves": 4, "illegal": False})


class Opponent(JsonServer):
    """Takes 1 always."""

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        return 200 if path == "/v1/chat/completions" else 404, chat_reply("I take 1")


@pytest.fixture
def opponent() -> Iterator[Opponent]:
    with Opponent().serving() as server:
        yield server


def test_a_served_opponent_is_sent_its_own_conversation(opponent: Opponent) -> None:
    endpoint = f"{opponent.url}/v1"
    policy = Scripted(lambda left: 2 if left > 1 else 1)
    episode = play(7, policy, endpoint)
    assert (policy.asked, episode.reward, episode.metrics["moves"]) == ([7, 4, 1], 1.0, 5)
    asked = [[message["content"].rpartition(" ")[2] for message in body["messages"]] for body in opponent.bodies]
    assert asked == [["5"], ["5", "1", "2"]]
    assert {(body["model"], body["temperature"], body["top_p"]) for body in opponent.bodies} == {("default", 1.0, 1.0)}
    with pytest.raises(httpx.HTTPStatusError):
        play(7, policy, f"{endpoint}/nowhere")


def test_the_settings_of_the_page(tmp_path: Path) -> None:
    settings = read_example("A game with an opponent", tmp_path)
    (row,) = re.findall(r"`(\{.*stones.*\})`", PAGE)
    (tmp_path / "nim.jsonl").write_text(row)
    path = str(tmp_path / "nim.jsonl")
    data = DataConfig(**settings["data"] | {"train": path})
    (prompt,) = load_train_prompts(PromptReader(data, make_tokenizer(["Nim"]), 64))
    assert prompt.columns["stones"] == 7
    rollout = settings["rollout"]
    game = ROLLOUT_FUNCTIONS.resolve(rollout["function"], "rollout.function", rollout["function_args"])
    assert type(game).__name__ == Nim.__name__
    with pytest.raises(UserError, match="opponent='me' is none of perfect, random, self, second, and no URL"):
        ROLLOUT_FUNCTIONS.resolve(rollout["function"], "rollout.function", {"opponent": "me"})


def test_an_illegal_move_loses_and_random_ones_are_legal() -> None:
    episode = play(9, Scripted(lambda left: 4), "random")
    assert (episode.reward, episode.metrics) == (0.0, {"won": False, "moves": 0, "illegal": True})
    for stones in range(1, 30):
        assert play(stones, Scripted(lambda left: 1), "random").metrics["illegal"] == 0
    assert [read_move(text, 2) for text in ("2", "I had 3, take 1.", "3", "none", "1" * 5000, "-")] == [
        *(2, 1, None, None, None, None)
    ]
