"""What the policy is asked as its own teacher, beside TRL's wording; which samples are taught; what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trl.experimental.sdpo import SDPOConfig

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.config import check_settings
from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import PromptReader, load_train_prompts
from grpo_mp.data.self_teacher import SelfTeacher
from grpo_mp.data.template import ChatRenderer
from grpo_mp.rewards.settings import DATA_SET
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message, Prompt, Sample, SampleGroup
from tests.data.prompt_sets import TOKENIZER, write
from tests.minimal_settings import MINIMAL_SETTINGS

MESSAGES: tuple[Message, ...] = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
COLUMNS: dict[str, Any] = {"question": "1+1?", "more": {"solution": "It is 2."}}
TRL = {field.name: field.default for field in vars(SDPOConfig)["__dataclass_fields__"].values()}


def tokens_of(text: str) -> tuple[int, ...]:
    """The prompt with another text in the last message, by transformers alone."""
    messages = [MESSAGES[0], {"role": "user", "content": text}]
    shown = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(TOKENIZER(shown, add_special_tokens=False)["input_ids"])


PROMPT = Prompt(7, "1+1?", tokens_of("1+1?"), columns=COLUMNS, messages=MESSAGES)


def group_of(*samples: tuple[str, bool | None], prompt: Prompt = PROMPT) -> SampleGroup:
    """Samples by text, and whether they are right."""
    made = [Sample.from_tokens(3, prompt.tokens, (1, 2, 3)) for _ in samples]
    pairs = zip(made, samples, strict=True)
    return SampleGroup(
        prompt, tuple(replace(one, index=i, text=t, is_correct=r) for i, (one, (t, r)) in enumerate(pairs))
    )


def show(group: SampleGroup, teacher: Any = "self", max_tokens: int = 10_000) -> list[tuple[int, ...]]:
    config = DistillationConfig.model_validate({"teacher": teacher})
    own = SelfTeacher.load(config, ChatRenderer(TOKENIZER), max_tokens)
    assert own
    return [sample.teacher_prompt for sample in own.show(group).samples]


def by_trl(solution: str = "", feedback: str = "") -> tuple[int, ...]:
    """TRL's text of SDPO, without its blank lines at the ends of parts."""
    shown = TRL["solution_template"].format(successful_previous_attempt=solution) if solution else ""
    told = TRL["feedback_template"].format(feedback_raw=feedback) if feedback else ""
    part = (shown or told).rstrip("\n")
    return tokens_of(TRL["reprompt_template"].format(prompt="1+1?", solution=part, feedback="").rstrip("\n"))


def test_another_right_answer_of_the_group_is_shown_without_its_thinking() -> None:
    """The first but one's own; the only right one has no teacher, and is right for all others."""
    group = group_of(("two", None), ("<think>hm\n</think>\n2", True), ("3", False), ("II", True))
    assert show(group) == [by_trl("2"), by_trl("II"), by_trl("2"), by_trl("2")]
    assert show(group_of(("3", False), ("2", True))) == [by_trl("2"), ()]
    assert show(group_of(("3", False), ("4", None))) == [(), ()]


def test_feedback_is_shown_to_a_wrong_answer_if_no_answer_is_right() -> None:
    group = group_of(("3", False), ("4", False), ("5", False))
    extras = ({"feedback": "One too many."}, {}, {"feedback": ""})
    told = replace(
        group, samples=tuple(replace(one, extra=extra) for one, extra in zip(group.samples, extras, strict=True))
    )
    assert show(told) == [by_trl(feedback="One too many."), (), ()]
    first, *others = told.samples
    solved = replace(told, samples=(first, replace(others[0], text="2", is_correct=True), others[1]))
    assert show(solved)[0] == by_trl("2")
    alone = replace(told, samples=(replace(first, is_correct=True), *others))
    assert show(alone)[0] == ()


@pytest.mark.parametrize("value", ["It is 2.", [{"role": "assistant", "content": "It is 2."}]])
def test_a_demonstration_is_shown_in_the_words_of_sdft(value: Any) -> None:
    prompt = replace(PROMPT, columns={"more": {"solution": value}})
    expected = tokens_of(
        "1+1?\n\nThis is an example for a response to the question:\nIt is 2.\n\n"
        "Now answer with a response of your own, including the thinking process."
    )
    assert show(group_of(("3", False), ("2", True), prompt=prompt), "self:more.solution") == [expected] * 2


def test_sequences_that_are_not_taught() -> None:
    """Too long with the teacher's prompt, or begun by another prompt; an earlier sequence keeps what follows."""
    group = group_of(("3", False), ("2", True), ("2", True))
    (taught, *_) = shown = show(group)
    assert show(group, max_tokens=len(taught) + 3) == shown
    assert show(group, max_tokens=len(taught) + 2) == [(), (), ()]
    assert show(replace(group, finished=False)) == [(), (), ()]
    first, *others = group.samples
    longer = replace(first, prompt_tokens=(*PROMPT.tokens, 8, 9), part=1)
    rewritten = replace(first, prompt_tokens=(8, *PROMPT.tokens), earlier=(longer,))
    config = DistillationConfig.model_validate({"teacher": "self"})
    own = SelfTeacher.load(config, ChatRenderer(TOKENIZER), 10_000)
    assert own
    sample = own.show(replace(group, samples=(rewritten, *others))).samples[0]
    assert [part.teacher_prompt for part in sample.sequences] == [(*taught, 8, 9), ()]


def test_every_set_has_its_teacher() -> None:
    """Another model teaches logic."""
    teacher = {"math": {"path": "self"}, "code": {"path": "self:solution"}, "logic": {"path": "http://x"}}
    config = DistillationConfig.model_validate({"teacher": teacher})
    assert config.teachers.keys() == {"teacher.logic"}
    for name, count in (("math", 1), ("code", 2), ("logic", 0)):
        prompt = replace(PROMPT, columns={DATA_SET: name, "solution": "2"})
        shown = show(group_of(("3", False), ("2", True), prompt=prompt), teacher)
        assert sum(map(bool, shown)) == count
    assert SelfTeacher.load(DistillationConfig.model_validate({"teacher": "x"}), ChatRenderer(TOKENIZER), 9) is None


def one_too_few(prompt: Prompt, samples: Sequence[Sample]) -> list[list[Message]]:
    return [[*prompt.messages]] * (len(samples) - 1)


def test_what_is_refused() -> None:
    group = group_of(("3", False), ("2", True))
    for teacher, sentence in (
        (f"self:{__file__}:one_too_few", "prompt 7: the teacher's prompts failed: ValueError: 1 for 2 samples"),
        (
            "self:solution",
            "^prompt 7: no column solution, which algorithm.distillation.teacher.path=self:solution shows",
        ),
        (f"self:{__file__}:tokens_of", "as teacher's prompt it is called with \\(prompt, samples\\)"),
        (f"self:{__file__}:shown", "has no shown \\(did you mean show"),
    ):
        with pytest.raises(UserError, match=sentence):
            show(group, teacher)
    with pytest.raises(UserError, match=r"teacher.path=self shows .* and no reward term defines correctness: set rew"):
        check_settings(MINIMAL_SETTINGS | {"algorithm": "sdpo", "reward": {"boxed": 1.0}}, "test")
    hot = MINIMAL_SETTINGS["rollout"] | {"temperature": 0.7}
    check_settings(MINIMAL_SETTINGS | {"algorithm": "sdpo", "rollout": hot}, "test")


def test_a_row_whose_demonstration_is_too_long_is_left_out(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2", "solution": "2" * length} for length in (1, 400)]
    data = DataConfig(train={"train": {"path": str(write(tmp_path / "rows.jsonl", rows))}})
    reader = PromptReader(data, TOKENIZER, 200)
    assert len(load_train_prompts(reader)) == 2
    (prompt,) = (found := load_train_prompts(reader, {"": "solution"}))
    assert found.warnings[0].startswith("data.train: 1 of 2 prompts, with their demonstration, are longer than ")
    assert prompt.columns["solution"] == "2"
    with pytest.raises(UserError, match=r"no column proof, which algorithm.distillation.teacher.path=self:proof shows"):
        load_train_prompts(reader, {"train": "proof"})
