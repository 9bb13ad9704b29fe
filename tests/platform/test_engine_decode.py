"""Decode steps with keys kept side by side against attention of one sequence at a time."""

from dataclasses import dataclass

import pytest
import torch

from grpo_mp.platform import engine_decode
from grpo_mp.platform.engine_decode import RunningSequences, room_for
from tests.platform.test_engine_attention import one_by_one

ROWS, LONGEST, LAYERS = 12, 300, 2
BOUND = {"atol": 2e-6, "rtol": 1e-5}


@dataclass
class Engine:
    """A paged cache as SGLang's: `table` [row, token] names the slot of each token of each running sequence."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    table: torch.Tensor
    lengths: dict[int, int]

    @classmethod
    def make(cls, groups: int, size: int, value_size: int, latent: bool) -> "Engine":
        slots = ROWS * LONGEST
        keys = [torch.randn(slots, groups, size) for _ in range(LAYERS)]
        values = [torch.randn(slots, groups, value_size) for _ in range(LAYERS)]
        if latent:
            values = [layer[..., :value_size] for layer in keys]
        return cls(keys, values, torch.randperm(slots).view(ROWS, LONGEST).int(), {})

    def decode(self, running: RunningSequences, heads: int) -> None:
        """One step: each sequence gets a token, and every layer attends; checked against torch, one at a time."""
        for row in self.lengths:
            self.lengths[row] += 1
        rows, lengths = list(self.lengths), list(self.lengths.values())
        running.step(rows, lengths, self.table)
        for keys, values in zip(self.keys, self.values, strict=True):
            newest = self.table[rows, torch.tensor(lengths) - 1]
            keys[newest] = torch.randn(len(rows), *keys.shape[1:])
            query = torch.randn(len(rows), heads, keys.shape[2])
            found = running.attend(query, keys, values, 0.3)
            wanted = one_by_one(query, keys, values, self.table[rows].long(), lengths, [1] * len(rows), 0.3)
            torch.testing.assert_close(found, wanted, **BOUND)

    def prefill(self, running: RunningSequences, row: int, length: int) -> None:
        """A new sequence in `row`: its tokens are written wherever the table has it now."""
        self.table[row] = self.table[row][torch.randperm(LONGEST)]
        for keys in self.keys:
            keys[self.table[row, :length].long()] = torch.randn(length, *keys.shape[1:])
        running.forget()
        self.lengths[row] = length


@pytest.fixture(params=[(4, 2, 8, 8, False), (4, 1, 12, 8, True), (3, 3, 4, 4, False)])
def engine_and_heads(request: pytest.FixtureRequest) -> tuple[Engine, int]:
    heads, groups, size, value_size, latent = request.param
    torch.manual_seed(0)
    return Engine.make(groups, size, value_size, latent), heads


def test_steps_equal_one_sequence_at_a_time(engine_and_heads: tuple[Engine, int]) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    for row, length in ((3, 60), (0, 5), (7, 61), (9, 130), (1, 200)):
        engine.prefill(running, row, length)
    for _ in range(6):  # two sequences outgrow their room on the way
        engine.decode(running, heads)
    assert sum(len(bucket.stayed) for bucket in running.buckets) == len(engine.lengths)


def test_sequences_leave_and_come(engine_and_heads: tuple[Engine, int]) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    for row in range(5):
        engine.prefill(running, row, 20 + row)
    engine.decode(running, heads)
    for row in (2, 0):
        del engine.lengths[row]
        engine.decode(running, heads)
    engine.prefill(running, 3, engine.lengths.pop(3))  # a new one in the row of another, and as long
    engine.decode(running, heads)
    engine.decode(running, heads)


def test_a_sequence_that_stood_still_is_gathered_anew(engine_and_heads: tuple[Engine, int]) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    for row in range(3):
        engine.prefill(running, row, 10)
    engine.decode(running, heads)
    paused = engine.lengths.pop(1)
    engine.decode(running, heads)
    engine.lengths[1] = paused
    engine.decode(running, heads)


def test_nothing_is_kept_past_the_limit(engine_and_heads: tuple[Engine, int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    engine.prefill(running, 0, 30)
    engine.decode(running, heads)
    assert [len(bucket.layers) for bucket in running.buckets] == [LAYERS]
    monkeypatch.setattr(engine_decode, "KEPT_LIMIT_BYTES", 1)
    engine.decode(running, heads)
    assert [len(bucket.layers) for bucket in running.buckets] == [0]
    engine.decode(running, heads)


def test_low_precision_stays() -> None:
    torch.manual_seed(0)
    engine = Engine.make(2, 8, 8, False)
    engine.keys, engine.values = ([layer.bfloat16() for layer in part] for part in (engine.keys, engine.values))
    running = RunningSequences()
    running.step([1, 4], [30, 9], engine.table)
    query = torch.randn(2, 4, 8).bfloat16()
    found = running.attend(query, engine.keys[0], engine.values[0], 0.3)
    rows = engine.table[[1, 4]].long()
    wanted = one_by_one(query, engine.keys[0], engine.values[0], rows, [30, 9], [1, 1], 0.3)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def test_room_is_at_least_the_length_and_little_more_than_half_as_much_again() -> None:
    assert all(length <= room_for(length) <= length * 3 / 2 + 64 for length in range(1, 5000))
