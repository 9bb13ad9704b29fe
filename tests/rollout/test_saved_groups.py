from pathlib import Path

import numpy as np

from grpo_mp.data.prompts import PromptSet
from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.saved_groups import load_groups, save_groups
from grpo_mp.rollout.worker import PausedGroup
from grpo_mp.types import Prompt, Sample, SampleGroup

PROMPTS = PromptSet("test", tuple(Prompt(index, str(index), (index,)) for index in range(9)), 0)
EXPERTS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)


def output(*tokens: int, **more: object) -> EngineOutput:
    return EngineOutput(tokens, tuple(-0.1 * token for token in tokens), (3,) * len(tokens), False, **more)  # type: ignore[arg-type]


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    """Every digit of a logprob, too; several files; a group without tokens is begun anew."""
    paused = PausedGroup(PROMPTS[7], (output(5, 6, aborted=True, cached_tokens=1), output(aborted=True)))
    other = PausedGroup(PROMPTS[8], (output(1), output(2, routed_experts=EXPERTS)))
    save_groups(tmp_path / "a", {4: paused, 11: other, 5: SampleGroup(PROMPTS[1], (), finished=False)}, 2)
    save_groups(tmp_path / "b", {2: paused, 3: PausedGroup(PROMPTS[1], ())}, 2)
    loaded = load_groups([tmp_path / "a", tmp_path / "b"], PROMPTS)
    assert loaded == {4: paused, 11: other, 2: paused}
    (_, experts) = (one.routed_experts for one in loaded[11].outputs)
    assert experts is not None
    assert np.array_equal(experts, EXPERTS)
    assert experts.dtype == EXPERTS.dtype


def test_a_finished_group_is_loaded_as_its_engine_gave_it(tmp_path: Path) -> None:
    """The response without a token keeps its place."""
    sample = Sample(70, 1, PROMPTS[7].tokens, (5, 6), (-0.1 / 3, -2e-30), (1, 2), truncated=True, reward=0.5)
    save_groups(tmp_path / "a", {0: SampleGroup(PROMPTS[7], (sample,))}, 2)
    empty, whole = load_groups([tmp_path / "a"], PROMPTS)[0].outputs
    assert empty == EngineOutput((), (), (), truncated=False)
    assert whole == EngineOutput((5, 6), (-0.1 / 3, -2e-30), (1, 2), truncated=True)


def test_nothing_is_written_where_nothing_was_begun(tmp_path: Path) -> None:
    save_groups(tmp_path / "a", {}, 2)
    assert not list(tmp_path.iterdir())
