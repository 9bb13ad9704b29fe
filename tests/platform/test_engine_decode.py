"""Decode steps with contiguous copies of keys and values against attention of one sequence at a time."""

from dataclasses import dataclass

import pytest
import torch

from grpo_mp.platform import engine_decode
from grpo_mp.platform.engine_decode import RunningSequences
from tests.platform.test_engine_attention import attention_per_sequence

ROWS, LONGEST, LAYERS = 12, 300, 2
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}


@dataclass
class Engine:
    """A paged cache like SGLang's: `table` [row, token] holds the slot of each token of each running sequence."""

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
        """Do one step in which each sequence gets a token; check every layer against torch."""
        for row in self.lengths:
            self.lengths[row] += 1
        rows, lengths = list(self.lengths), list(self.lengths.values())
        running.step(rows, lengths, self.table)
        for keys, values in zip(self.keys, self.values, strict=True):
            newest_slots = self.table[rows, torch.tensor(lengths) - 1]
            keys[newest_slots] = torch.randn(len(rows), *keys.shape[1:])
            query = torch.randn(len(rows), heads, keys.shape[2])
            output = running.attend(query, keys, values, 0.3)
            slots = self.table[rows].long()
            expected = attention_per_sequence(query, keys, values, slots, lengths, [1] * len(rows), 0.3)
            torch.testing.assert_close(output, expected, **TOLERANCE)

    def prefill(self, running: RunningSequences, row: int, length: int) -> None:
        self.table[row] = self.table[row][torch.randperm(LONGEST)]
        for keys in self.keys:
            keys[self.table[row, :length].long()] = torch.randn(length, *keys.shape[1:])
        running.clear()
        self.lengths[row] = length


@pytest.fixture(params=[(4, 2, 8, 8, False), (4, 1, 12, 8, True), (3, 3, 4, 4, False)])
def engine_and_heads(request: pytest.FixtureRequest) -> tuple[Engine, int]:
    heads, groups, size, value_size, latent = request.param
    torch.manual_seed(0)
    return Engine.make(groups, size, value_size, latent), heads


def test_steps_equal_attention_per_sequence(engine_and_heads: tuple[Engine, int]) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    for row, length in ((3, 60), (0, 5), (7, 61), (9, 130), (1, 200)):
        engine.prefill(running, row, length)
    for _ in range(6):  # two sequences outgrow their capacity
        engine.decode(running, heads)
    assert sum(len(bucket.kept) for bucket in running.buckets) == len(engine.lengths)


def test_sequences_end_and_start(engine_and_heads: tuple[Engine, int]) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    for row in range(5):
        engine.prefill(running, row, 20 + row)
    engine.decode(running, heads)
    for row in (2, 0):
        del engine.lengths[row]
        engine.decode(running, heads)
    engine.prefill(running, 3, engine.lengths.pop(3))  # a new one in the row of another, of the same length
    engine.decode(running, heads)
    engine.decode(running, heads)


def test_paused_sequence_is_gathered_again(engine_and_heads: tuple[Engine, int]) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    for row in range(3):
        engine.prefill(running, row, 10)
    engine.decode(running, heads)
    paused = engine.lengths.pop(1)
    engine.decode(running, heads)
    engine.lengths[1] = paused
    engine.decode(running, heads)


def test_no_copy_is_kept_past_the_limit(engine_and_heads: tuple[Engine, int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, heads = engine_and_heads
    running = RunningSequences()
    engine.prefill(running, 0, 30)
    engine.decode(running, heads)
    assert [len(bucket.layers) for bucket in running.buckets] == [LAYERS]
    monkeypatch.setattr(engine_decode, "MAX_KEPT_BYTES", 1)
    engine.decode(running, heads)
    assert [len(bucket.layers) for bucket in running.buckets] == [0]
    engine.decode(running, heads)


def test_bfloat16_cache() -> None:
    torch.manual_seed(0)
    engine = Engine.make(2, 8, 8, False)
    engine.keys = [layer.bfloat16() for layer in engine.keys]
    engine.values = [layer.bfloat16() for layer in engine.values]
    running = RunningSequences()
    running.step([1, 4], [30, 9], engine.table)
    query = torch.randn(2, 4, 8).bfloat16()
    output = running.attend(query, engine.keys[0], engine.values[0], 0.3)
    slots = engine.table[[1, 4]].long()
    expected = attention_per_sequence(query, engine.keys[0], engine.values[0], slots, [30, 9], [1, 1], 0.3)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
