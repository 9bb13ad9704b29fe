"""Several train sets in one order: shares, repeats, resuming; their columns, system prompts and pass rates."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_mp.config import Settings, load_settings
from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.cursor import Cursor, PromptQueue, mix_sets, take
from grpo_mp.data.prompts import PromptReader, load_eval_prompts
from grpo_mp.rewards.base import call_arguments
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Sample, SampleGroup
from tests.data.prompt_sets import TOKENIZER, load, write
from tests.minimal_settings import MINIMAL_SETTINGS

SIZES = st.lists(st.integers(1, 30), min_size=2, max_size=4)


@given(SIZES, st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(0, 99), st.booleans())
def test_an_epoch_repeats_nothing_and_each_set_is_gone_through(
    sizes: list[int], weights: list[int], seed: int, shuffle: bool
) -> None:
    mixture = mix_sets(sizes, weights[: len(sizes)])
    length = sum(share.count for share in mixture)
    cursor = Cursor(seed=seed)
    seen = Counter[int]()
    epochs = max(-(-share.size // share.count) for share in mixture)
    for _ in range(epochs):
        taken, cursor = take(cursor, length, length, shuffle, mixture=mixture)
        assert len(set(taken)) == length
        for share in mixture:
            assert sum(share.first <= index < share.first + share.size for index in taken) == share.count
        seen.update(taken)
    assert set(seen) == set(range(sum(sizes)))


def test_each_step_has_the_shares() -> None:
    """The small set is a third of every step, and comes often."""
    mixture = mix_sets((40, 10), (2.0, 1.0))
    assert [share.count for share in mixture] == [20, 10]
    cursor = Cursor(seed=1)
    small = Counter[int]()
    for _ in range(20):
        step, cursor = take(cursor, 30, 6, True, mixture=mixture)
        assert sum(index >= 40 for index in step) == 2
        small.update(index for index in step if index >= 40)
    assert small == dict.fromkeys(range(40, 50), 4)


@example([2, 9], [1, 4, 3], 0)  # of what the second step has drawn, the next epoch has the second only
@given(SIZES, st.lists(st.integers(1, 6), max_size=12), st.integers(0, 99))
def test_a_run_that_resumes_draws_the_same_and_no_step_repeats_a_prompt(
    sizes: list[int], counts: list[int], seed: int
) -> None:
    mixture = mix_sets(sizes, [1.0] * len(sizes))
    length = sum(share.count for share in mixture)
    cursor = Cursor(seed=seed)
    running = PromptQueue(length, True, mixture)
    stream = list[int]()
    for count in counts:
        resumed = PromptQueue(length, True, mixture)
        for queue in (running, resumed):
            queue.begin_step(cursor, lambda _: False, None)
        drawn = [[queue[number] for number in range(count)] for queue in (running, resumed)]
        assert drawn[0] == drawn[1]
        assert count > length or len(set(drawn[0])) == count
        stream += drawn[0]
        cursor = running.use_up(count)
    for start in range(0, len(stream) - length + 1, length):  # also where steps run over the end of an epoch
        epoch = stream[start : start + length]
        for share in mixture:
            assert len({index for index in epoch if share.first <= index < share.first + share.size}) == share.count


def test_sets_have_their_own_columns(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"question": "How", "answer": "1"}, {"question": "many", "answer": "2"}])
    second = write(tmp_path / "b.jsonl", [{"problem": "apples", "answer": "3", "level": 4}])
    mixed = {"problem": {"path": second, "prompt_column": "problem", "weight": 3}}
    prompts = load({"plain": first, **mixed}, system_prompt="apples")
    assert [(prompt.index, prompt.text, prompt.answer) for prompt in prompts] == [
        (0, "How", "1"),
        (1, "many", "2"),
        (2, "apples", "3"),
    ]
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["apples", "apples", "apples"]
    assert [prompt.columns["data_set"] for prompt in prompts] == ["plain", "plain", "problem"]
    assert prompts[2].columns["level"] == 4
    assert prompts.epoch_size == 2  # 1 of each: the second set is a whole, 3 of 1 are a third


def test_prompts_outside_of_the_pass_rates_are_left_out(tmp_path: Path) -> None:
    """By samples as `grpo-mp evaluate` writes them, or by rates; what was not measured stays."""
    source = write(tmp_path / "a.jsonl", [{"question": text, "answer": "1"} for text in ("How", "many", "apples", "3")])
    verdicts = {"How": (True, True, None), "many": (False, True), "apples": (False, False), "3": (None,)}
    rows = [{"prompt": text, "is_correct": right} for text, all_right in verdicts.items() for right in all_right]
    samples = write(tmp_path / "samples.jsonl", rows)
    chosen = {"path": source, "pass_rates": samples, "pass_rate_range": [0.1, 0.9]}
    prompts = load({"train": chosen})
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "many"), (1, "3")]
    assert prompts.filtered == 2
    rates = write(tmp_path / "rates.jsonl", [{"prompt": "How", "pass_rate": 0.05}])
    assert [prompt.text for prompt in load({"train": chosen | {"pass_rates": rates}})] == ["many", "apples", "3"]


def test_pass_rates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"question": "How", "answer": "1"}])
    for row, message in (
        ({"prompt": "How", "pass_rate": 1.5}, "line 1: expected a prompt with is_correct"),
        ({"prompt": "other", "pass_rate": 1}, "none of its prompts is in"),
        ({"prompt": "How", "pass_rate": 1}, "no prompt has a pass rate from 0 to 0.5"),
    ):
        rates = write(tmp_path / "rates.jsonl", [row])
        with pytest.raises(UserError, match=message):
            load({"train": {"path": source, "pass_rates": rates, "pass_rate_range": [0.0, 0.5]}})


def test_eval_sets_have_their_own_columns(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"question": "How", "answer": "1"}])
    second = write(tmp_path / "b.jsonl", [{"task": {"problem": [{"role": "user", "content": "many"}]}, "label": 2}])
    own = {"path": second, "prompt_column": "task.problem", "answer_column": "label"}
    data = DataConfig(train=first, eval={"same": first, "own": own}, system_prompt="How many")
    sets = load_eval_prompts(PromptReader(data, TOKENIZER, 100))
    found = {name: (one[0].text, one[0].answer, [m["content"] for m in one[0].messages]) for name, one in sets.items()}
    assert found == {"same": ("How", "1", ["How many", "How"]), "own": ("many", "2", ["How many", "many"])}
    groups = {name: SampleGroup(one[0], (Sample.from_tokens(0, (1,), (2,)),)) for name, one in sets.items()}
    asked = {name: call_arguments(group, "question")["prompts"] for name, group in groups.items()}
    assert asked["same"] == ["How"]
    assert asked["own"] == [[{"role": "user", "content": "many"}]]


def read(tmp_path: Path, data: dict[str, Any], *overrides: str) -> Settings:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MINIMAL_SETTINGS | {"data": data}))
    return load_settings(tmp_path / "config.yaml", list(overrides))


def test_rewards_of_sets_name_terms_of_the_reward(tmp_path: Path) -> None:
    def weights(reward: dict[str, float], *overrides: str) -> dict[str, dict[str, float]]:
        sets = {"x": "a.jsonl", "y": {"path": "b.jsonl", "reward": reward}}
        return read(tmp_path, {"train": sets}, "reward.functions={'mine.py:brevity': 0}", *overrides).data.set_weights

    assert weights({"boxed": 2, "brevity": 1}) == {"y": {"boxed": 2.0, "brevity": 1.0}}
    assert weights({"code": 1}, "reward.code={weight: 0}") == {"y": {"code": 1.0}}
    for reward, override, message in (
        ({"bosed": 1}, "run.seed=1", r"data\.train\.y\.reward: no term .* named 'bosed' \(did you mean boxed\?\)"),
        ({"boxed": 1}, "algorithm.advantage.combine=normalize", r"combine=normalize weighs terms alike in all sets"),
    ):
        with pytest.raises(UserError, match=message):
            weights(reward, override)
