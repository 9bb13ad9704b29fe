import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.groups import EndedGroup, PausedGroup
from grpo_mp.rollout.journal import (
    GroupJournal,
    Record,
    best_records,
    find_paused,
    journal_file,
    load,
    prune,
    read_records,
)
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

PROMPT = Prompt(7, "How much?", (5, 6), "3", {"level": "hard"}, epoch=2)
EXPERTS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)


def output(*tokens: int, **more: object) -> EngineOutput:
    return EngineOutput(tokens, tuple(-0.1 * token / 3 for token in tokens), (3,) * len(tokens), False, **more)  # type: ignore[arg-type]


def sample(index: int, *tokens: int, **more: object) -> Sample:
    return Sample(40, index, PROMPT.tokens, tokens, (-2e-30,) * len(tokens), (1,) * len(tokens), False, **more)  # type: ignore[arg-type]


PAUSED = PausedGroup(PROMPT, (output(5, 6, aborted=True, cached_tokens=1, verify_steps=2), output(aborted=True)))
FINISHED = SampleGroup(PROMPT, (sample(1, 5, 6, reward=0.5, reward_terms={"answer": 0.5}, is_correct=False),))
SIBLING = PausedGroup(PROMPT, samples=(sample(2, 5, 6, state="completed", messages=({"role": "user"},)),))
EPISODE = SampleGroup(
    PROMPT,
    (
        sample(
            0,
            *(8, 9, 10),
            generated=(True, False, True),
            state="timeout",
            error="a tool hung \ud83d",
            messages=({"role": "tool", "content": "é"},),
            metrics={"turns": 2.0},
            step_rewards=((2, 0.5),),
            extra={"seen": [1, None]},
        ),
    ),
)
STATS = RewardStats(unscored=1, values={"length": [0.1, 2.0]}, first_errors={"answer": "it failed"})


def written(folder: Path, *groups: EndedGroup, step: int = 3) -> Path:
    journal = GroupJournal(folder, 1)
    for number, group in enumerate(groups):
        journal.append(step, 40 + number, group, STATS, kept=True)
    return journal_file(folder, step, 1)


@pytest.mark.parametrize(
    "group", [PAUSED, SIBLING, FINISHED, EPISODE], ids=["paused", "sibling", "finished", "episode"]
)
def test_what_is_written_is_what_is_read(tmp_path: Path, group: EndedGroup) -> None:
    """Every digit of a logprob, the mask of an episode and what its scoring counted; the prompt is the data's."""
    (record,) = read_records(written(tmp_path, group))
    assert (record.key, record.extent.finished) == ((40, 7, 2), isinstance(group, SampleGroup))
    loaded = load(record, PROMPT)
    assert loaded is not None
    assert loaded == (group, STATS)
    assert load(record, replace(PROMPT, tokens=(5,))) is None


def test_experts_keep_their_type(tmp_path: Path) -> None:
    whole = sample(0, 1, 2, routed_experts=EXPERTS)
    groups = (PausedGroup(PROMPT, (output(1, routed_experts=EXPERTS),)), SampleGroup(PROMPT, (whole,)))
    for record in read_records(written(tmp_path, *groups)):
        group, _ = load(record, PROMPT) or pytest.fail("another prompt")
        (part,) = group.outputs if isinstance(group, PausedGroup) else group.samples
        assert part.routed_experts is not None
        assert np.array_equal(part.routed_experts, EXPERTS)
        assert part.routed_experts.dtype == EXPERTS.dtype


def test_a_file_that_is_cut_anywhere_keeps_what_is_whole_and_goes_on(tmp_path: Path) -> None:
    content = written(tmp_path, FINISHED, PAUSED).read_bytes()
    first = read_records(journal_file(tmp_path, 3, 1))[0]
    end = first.offset + first.size
    # Each append waits for the disk: not every length, but all around the records' headers and ends.
    for length in sorted({*range(12), *range(end - 2, end + 12), *range(0, len(content), 97), len(content) - 1}):
        file = journal_file(tmp_path / str(length), 3, 1)
        file.parent.mkdir(parents=True)
        file.write_bytes(content[:length])
        whole = int(length >= first.offset + first.size)
        assert len(read_records(file)) == whole
        GroupJournal(tmp_path / str(length), 1).append(3, 50, EPISODE, STATS, kept=False)
        assert [record.key[0] for record in read_records(file)] == [40, 50][1 - whole :]


def test_a_flipped_bit_is_noticed_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, FINISHED, PAUSED, EPISODE)
    rng = random.Random(0)
    content = file.read_bytes()
    records = read_records(file)
    for _ in range(200):
        place = rng.randrange(len(content))
        bit = rng.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        caplog.clear()
        whole = sum(record.offset + record.size <= place for record in records)
        assert read_records(file) == records[:whole]
        assert f"{file} is cut or damaged after {whole} groups" in caplog.text


def test_the_record_that_has_most_of_a_group_counts(tmp_path: Path) -> None:
    """Of another prompt with its id, which a step launched that was then repeated, there is another."""
    more = PausedGroup(PROMPT, (output(1, 2, 3),))
    other = PausedGroup(replace(PROMPT, index=8), (output(*range(9)),))
    journal = GroupJournal(tmp_path, 0)
    for step, group in enumerate((PAUSED, FINISHED, more, other)):
        journal.append(step, 40, group, STATS, kept=False)
    best = best_records(record for file in sorted(tmp_path.glob("*/*")) for record in read_records(file))
    assert {key: record.extent[:2] for key, record in best.items()} == {
        (40, 7, 2): (True, 2),
        (40, 8, 2): (False, 9),
    }


def test_episodes_of_a_group_are_read_together(tmp_path: Path) -> None:
    """Each was recorded when it ended, some again at a pause; a finished group has them all."""
    parts = [sample(index, *range(1, index + 3), state="completed") for index in range(4)]
    journal = GroupJournal(tmp_path, 0)
    recorded: list[EndedGroup] = [PausedGroup(PROMPT, samples=(parts[2],)), PausedGroup(PROMPT, samples=(parts[0],))]
    recorded += [PausedGroup(PROMPT, samples=(parts[0], parts[2])), PausedGroup(PROMPT, samples=(parts[3],))]
    for step, group in enumerate(recorded):
        journal.append(step, 40, group, RewardStats(), kept=False)

    def best() -> Record:
        files = sorted(tmp_path.glob("*/*"))
        (record,) = best_records(record for file in files for record in read_records(file)).values()
        return record

    whole = PausedGroup(PROMPT, samples=(parts[0], parts[2], parts[3]))
    assert best().extent == (False, 2 + 4 + 5, False)
    assert load(best(), PROMPT) == (whole, RewardStats())
    assert find_paused(tmp_path, range(9), 40, PROMPT) == whole
    journal.append(3, 40, FINISHED, STATS, kept=True)
    assert load(best(), PROMPT) == (FINISHED, STATS)


def test_what_is_trained_on_is_removed(tmp_path: Path) -> None:
    for step in (2, 3, 4):
        written(tmp_path, FINISHED, step=step)
    (tmp_path / "notes").write_text(json.dumps({}))
    prune(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000004"]
