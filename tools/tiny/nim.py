"""Nim, a game with an opponent. A row of the data has `stones`; the player who takes the last stone wins.

The opponent is scripted, the policy itself, or a model behind an OpenAI endpoint, such as an older version of the
policy. The policy's moves as the opponent are trained on with `second`, not with `self`.
"""

import random
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx

from grpo_mp.rollout.protocol import Episode, Policy, Task
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message

MOST = 3  # maximum number of stones per move
RULES = "Take 1, 2 or 3 stones. Who takes the last one wins. Answer with a number."
ROLE = "second"  # of the policy as its own opponent
OPPONENTS = ("perfect", "random", "self", ROLE)
Answer = Callable[[Sequence[Message]], Awaitable[Message]]  # messages so far -> answer
Side = Callable[[int], Awaitable[int | None]]  # stones left -> stones taken; None: no legal move


class Nim:
    """Rollout function of the game. The policy moves first; the reward is 1 for a win; an illegal move loses."""

    def __init__(self, opponent: str = "perfect", model: str = "default") -> None:
        """Check `opponent`: one of OPPONENTS, or the URL of an OpenAI endpoint that serves `model`."""
        if opponent not in OPPONENTS and not opponent.startswith(("http://", "https://")):
            raise UserError(
                f"rollout.function_args: opponent={opponent!r} is none of {', '.join(OPPONENTS)}, and no URL"
            )
        self._opponent = opponent
        self._model = model

    async def __call__(self, task: Task, policy: Policy) -> Episode:
        """Play a game and return the policy's episode."""
        sides = Player(by_policy(policy)).move, self._other_side(task, policy)
        stones = int(task.prompt.columns["stones"])
        moves = 0
        while stones:
            taken = await sides[moves % 2](stones)
            if taken is None:
                break
            stones = stones - taken
            moves = moves + 1
        # The player of the last legal move has won: it took the last stone, or the opponent's next move was illegal.
        won = moves % 2 == 1
        episode = policy.episode(
            reward=float(won), metrics={"won": won, "moves": moves, "illegal": stones > 0 and not won}
        )
        if self._opponent != ROLE:
            return episode
        return episode.with_role_rewards({"": float(won), ROLE: float(not won)})

    def _other_side(self, task: Task, policy: Policy) -> Side:
        if self._opponent == "self":
            return Player(by_policy(policy.unrecorded())).move
        if self._opponent == ROLE:
            return Player(by_policy(policy, ROLE)).move
        if self._opponent == "perfect":
            return scripted(perfect_move)
        if self._opponent != "random":
            return Player(by_endpoint(self._opponent, self._model, policy)).move
        rng = random.Random(f"{task.step}/{task.prompt.index}/{task.index}")
        return scripted(lambda stones: rng.randint(1, min(MOST, stones)))


def scripted(choose: Callable[[int], int]) -> Side:
    """Return a side that plays by a function: stones left -> stones to take."""

    async def move(stones: int) -> int:
        return choose(stones)

    return move


def perfect_move(stones: int) -> int:
    """Return the move that leaves a multiple of four stones, or 1 if no move does."""
    return stones % (MOST + 1) or 1


def by_policy(policy: Policy, role: str = "") -> Answer:
    """Return a function that answers with the policy in a role."""

    async def answer(messages: Sequence[Message]) -> Message:
        return (await policy.generate(messages, role=role)).message

    return answer


def by_endpoint(url: str, model: str, policy: Policy) -> Answer:
    """Return a function that answers with a served model, sampled like the policy.

    The function raises httpx.HTTPError if the request fails, which fails the episode.
    """

    async def answer(messages: Sequence[Message]) -> Message:
        body = {"model": model, "messages": messages, "temperature": policy.temperature, "top_p": policy.top_p}
        # rollout.limits.episode_s limits the game. With trust_env a proxy would get even requests to loopback.
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            reply = await client.post(f"{url.rstrip('/')}/chat/completions", json=body)
        content = reply.raise_for_status().json()["choices"][0]["message"]["content"]
        return {"role": "assistant", "content": content or ""}

    return answer


@dataclass
class Player:
    """A side that a model plays in its own conversation."""

    answer: Answer
    messages: tuple[Message, ...] = ()

    async def move(self, stones: int) -> int | None:
        """Ask the model for the next move; return the move, or None if it is illegal."""
        asked: Message = {"role": "user", "content": f"{RULES} Stones: {stones}"}
        said = await self.answer([*self.messages, asked])
        self.messages = (*self.messages, asked, said)
        return read_move(said["content"], stones)


def read_move(text: str, stones: int) -> int | None:
    """Return the last number in `text` if it is a legal move, else None."""
    numbers = re.findall(r"[0-9]+", text)
    legal = [str(number) for number in range(1, min(MOST, stones) + 1)]
    return int(numbers[-1]) if numbers and numbers[-1] in legal else None
