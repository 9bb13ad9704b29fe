"""The `reward` section: terms of the reward, each with its weight."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_mp.section import Section, as_bytes


class Overlong(Section):
    weight: float = Field(
        0.0, ge=0, description="of half the reward's range (reward.range): 1 as in DAPO, whose rewards are -1 and 1"
    )
    buffer_tokens: int | None = Field(
        None, gt=0, description="before max_response_tokens, L_cache of DAPO; null: a fifth of it, as there"
    )


class Repetition(Section):
    weight: float = Field(0.0, ge=0, description="0: off")
    ngram: int = Field(4, gt=0, description="tokens")


class RewardModel(Section):
    url: str = Field(pattern="^https?://", description="an SGLang server with a reward head and the policy's tokenizer")
    weight: float = 1.0
    key_variable: str | None = Field(None, description="environment variable that holds the server's API key")
    timeout_s: float = Field(30.0, gt=0, description="limit of one call for one group")
    retries: int = Field(2, ge=0, description="after no answer, or a status of 429 or 500 and above")


class StepModel(RewardModel):
    """A process reward model, which scores the response up to the end of each step."""

    separator: str = Field("\n\n", min_length=1, description="text that ends a step; the response's end ends the last")


class Code(Section):
    weight: float = 1.0
    tests: str = Field("tests", description="data column: asserts, a list of them, or a list of {input, output}")
    partial: bool = Field(False, description="the share of passed tests; false: 1 if all pass, else 0")
    isolation: Literal["required", "best_effort"] = Field(
        "required", description="refuse, or run with limits only, where the kernel gives no namespaces"
    )
    parallel: int = Field(4, gt=0, description="programs that run at one time on one rank")
    timeout_s: float = Field(5.0, gt=0, description="limit for all tests of one response")
    memory_bytes: int = Field(512 * 2**20, gt=0, description="address space of each process of a program")
    output_bytes: int = Field(2**20, gt=0, description="the largest file a program may write, its output included")
    processes: int = Field(16, gt=0, description="processes and threads of one program")

    _unit = field_validator("memory_bytes", "output_bytes", mode="before")(as_bytes)


class Right(Section):
    """The rule for correct answers: those whose value of one part of the reward reaches a threshold."""

    part: str = Field(description="answer, code, model, another built-in part, or the name of a function")
    at_least: float = Field(1.0, description="value of the part, before its weight")


class Reward(Section):
    answer: float = 0.0
    boxed: float = 0.0
    boxed_answer: Literal["last", "first"] = Field("last", description="which \\boxed{} of a response is its answer")
    tolerance: float = Field(
        0.01, ge=0, description="between numbers that are equal answers; below 1, relative to the expected number"
    )
    length: float = Field(0.0, description="weight of min(1, tokens / max_response_tokens); negative punishes length")
    range: tuple[float, float] | None = Field(
        None,
        description="lowest and highest reward without penalties, which overlong is measured by; null: from 0 to the "
        "sum of the weights of answer, boxed, model, code and functions, each of which is taken to lie in 0 to 1",
    )
    overlong: Overlong = Overlong()
    repetition: Repetition = Repetition()
    model: RewardModel | None = None
    code: Code | None = None
    functions: dict[str, float] = Field({}, description="'module:function' or 'file.py:function' to its weight")
    steps: str | StepModel | None = Field(
        None, description="what rewards single steps: 'module:function', 'file.py:function', or {url} of a served model"
    )
    right: Right | None = Field(
        None,
        description="a part's name, or {part, at_least}; null: answer, or code, where it has a weight, else nothing",
    )
    timeout_s: float = Field(30.0, gt=0)
    on_error: Literal["stop"] | float = Field("stop", description="or the reward that a failing call scores")

    @property
    def correctness_rule(self) -> Right | None:
        """Return the part and threshold by which an answer is correct; None where the reward has no such part."""
        candidates = (("answer", self.answer), ("code", self.code.weight if self.code else 0.0))
        return self.right or next((Right(part=name) for name, weight in candidates if weight), None)

    @field_validator("right", mode="before")
    @classmethod
    def _right_from_name(cls, value: Any) -> Any:
        return {"part": value} if isinstance(value, str) else value

    @property
    def has_outcome(self) -> bool:
        """Say whether anything rewards whole responses."""
        sections = (self.overlong, self.repetition, self.model, self.code)
        weights = [section.weight for section in sections if section]
        return any((self.answer, self.boxed, self.length, *weights, self.functions))

    @property
    def span(self) -> float:
        """Return highest minus lowest reward, without penalties."""
        if self.range is not None:
            return self.range[1] - self.range[0]
        weights = [section.weight for section in (self.model, self.code) if section]
        return sum(map(abs, (self.answer, self.boxed, *weights, *self.functions.values())))

    @field_validator("range")
    @classmethod
    def _range_ascends(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"{list(value)} is no range: write the lowest reward, then the highest")
        return value

    @model_validator(mode="after")
    def _overlong_has_a_range(self) -> "Reward":
        if self.overlong.weight and not self.span:
            raise ValueError("reward.overlong weighs by the range of the reward, which is 0 here: set reward.range")
        return self

    @model_validator(mode="after")
    def _some_reward(self) -> "Reward":
        if not (self.has_outcome or self.steps):
            raise ValueError("no reward has a weight: set reward.answer, reward.boxed or reward.functions")
        return self
