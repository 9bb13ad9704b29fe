"""Prompts of self-distillation: what the policy is asked as its own teacher.

SDFT (Shenfeld et al., arXiv 2601.19897) shows a demonstration of the data, SDPO (Hübotter et al., arXiv 2601.20802) a
right answer of the group or, without one, feedback. The wording is that of the authors' code.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from grpo_mp.algorithms.distillation_settings import RIGHT_ANSWERS, DistillationConfig, of_set
from grpo_mp.algorithms.registries import TEACHER_PROMPTS
from grpo_mp.data.template import ChatRenderer, read_messages
from grpo_mp.rewards.settings import DATA_SET
from grpo_mp.utils.errors import UserError, refuse_failures
from grpo_mp.utils.reading import has_column, read_column
from grpo_mp.utils.types import Message, Prompt, Sample, SampleGroup

SETTING = "algorithm.distillation.teacher"
DEMONSTRATION = """{prompt}

This is an example for a response to the question:
{shown}

Now answer with a response of your own, including the thinking process."""
SOLVE = "{prompt}\n{shown}\n\nCorrectly solve the original question."
FEEDBACK = "feedback"  # name under which a reward function passes feedback on an answer to `log_extra`
THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


class TeacherPrompt(Protocol):
    """Writes what the policy is asked as its own teacher.

    `prompt`: with the messages that the policy was asked, and the columns of the data row; `samples`: the group.
    """

    def __call__(self, prompt: Prompt, samples: Sequence[Sample], /) -> Sequence[Sequence[Message] | None]:
        """Return the teacher's messages for each sample; None: the sample has no teacher."""


def with_demonstration(
    messages: Sequence[Message], columns: Mapping[str, Any], column: str, location: str
) -> list[Message]:
    """Return the messages with a demonstration in the last question: a column with text or messages of the assistant.

    Raises UserError if the column is missing or has another type.
    """
    if not has_column(columns, column):
        raise UserError(f"{location}: no column {column}, which {SETTING}.path=self:{column} shows")
    shown = read_messages(read_column(columns, column), f"{location}: column {column}", "assistant")
    return _asked(messages, DEMONSTRATION, "\n".join(message["content"] for message in shown))


def show_demonstration(prompt: Prompt, samples: Sequence[Sample], column: str) -> list[list[Message] | None]:
    """Write prompts with a column of the data (SDFT); see `TeacherPrompt`."""
    return [with_demonstration(prompt.messages, prompt.columns, column, f"prompt {prompt.index}")] * len(samples)


def show_right_answer(prompt: Prompt, samples: Sequence[Sample]) -> list[list[Message] | None]:
    """Write prompts with the first other right answer of the group, without its thinking (SDPO); see `TeacherPrompt`.

    Without one, a wrong answer is shown the feedback in its `extra`, if any.
    """

    def shown(sample: Sample) -> str:
        right = next((one.text for one in samples if one.is_correct and one.index != sample.index), "")
        if solution := THINKING.sub("", right).strip():
            return f"Correct solution:\n\n{solution}"
        feedback = "" if sample.is_correct else sample.extra.get(FEEDBACK)
        return f"The following is feedback from your unsuccessful earlier attempt:\n\n{feedback}" if feedback else ""

    return [_asked(prompt.messages, SOLVE, text) if text else None for text in map(shown, samples)]


def _asked(messages: Sequence[Message], wording: str, shown: str) -> list[Message]:
    """Return the messages with another text in the last message of the user."""
    asks = [number for number, message in enumerate(messages) if message["role"] == "user"]
    last = asks[-1] if asks else len(messages) - 1
    text = wording.format(prompt=messages[last]["content"], shown=shown)
    return [*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :]]


def _load(what: str | None, column: str | None) -> TeacherPrompt | None:
    if column:
        return partial(show_demonstration, column=column)
    if what == RIGHT_ANSWERS:
        return show_right_answer
    return TEACHER_PROMPTS.resolve(what, f"{SETTING}.path=self") if what else None


@dataclass(frozen=True)
class SelfTeacher:
    """Adds the teacher's prompts to samples.

    A response is not taught if it is too long with the teacher's prompt, or if its sequence does not begin with the
    prompt of the data, as after an agent has rewritten its history.
    """

    writers: Mapping[str, TeacherPrompt | None]  # by data set; None: another model is its teacher
    renderer: ChatRenderer
    max_tokens: int  # of the teacher's prompt with a response

    @classmethod
    def load(
        cls, distillation: DistillationConfig | None, renderer: ChatRenderer, max_tokens: int
    ) -> "SelfTeacher | None":
        """Load the functions that write prompts; return None if the policy teaches no data set."""
        if distillation is None or not distillation.teaches_itself:
            return None
        columns = distillation.demonstrations
        writers = {name: _load(what, columns[name]) for name, what in distillation.shown.items()}
        return cls(writers, renderer, max_tokens)

    def show(self, group: SampleGroup) -> SampleGroup:
        """Return the group, if it is finished, with the teacher's prompts."""
        prompt = group.prompt
        write = of_set(self.writers, prompt.columns.get(DATA_SET))
        if not (write and group.finished and group.samples):
            return group
        with refuse_failures(f"{SETTING}: prompt {prompt.index}: the teacher's prompts failed"):
            written = write(prompt, group.samples)
            if len(written) != len(group.samples):
                raise ValueError(f"{len(written)} for {len(group.samples)} samples")
            asked = [self.renderer.prompt(messages) if messages else () for messages in written]
            samples = tuple(self._taught(*pair, prompt) for pair in zip(group.samples, asked, strict=True))
        return replace(group, samples=samples)

    def _taught(self, sample: Sample, asked: tuple[int, ...], prompt: Prompt) -> Sample:
        def taught(part: Sample) -> Sample:
            tokens = (*asked, *part.prompt_tokens[len(prompt.tokens) :])
            begins = part.prompt_tokens[: len(prompt.tokens)] == prompt.tokens
            fits = len(tokens) + len(part.tokens) <= self.max_tokens
            return replace(part, teacher_prompt=tokens) if asked and begins and fits else part

        return replace(taught(sample), earlier=tuple(map(taught, sample.earlier)))
