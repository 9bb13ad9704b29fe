"""The `reward` section: terms of the reward, each with its weight."""

from collections import Counter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_mp.errors import did_you_mean
from grpo_mp.section import Section, as_bytes

STEPS = "steps"  # the name under which step rewards are logged; no term of the reward
EPISODE = "episode"  # as reward.steps: what the rollout function gave


class OverlongConfig(Section):
    """DAPO's soft penalty of responses near the length limit (verl overlong_buffer)."""

    weight: float = Field(
        0.0,
        ge=0,
        description="largest penalty in halves of the reward's range (reward.range): 1 as in DAPO, whose rewards are "
        "-1 and 1; 0: off",
    )
    buffer_tokens: int | None = Field(
        None,
        gt=0,
        description="tokens before rollout.max_response_tokens in which the penalty rises, L_cache of DAPO; null: a "
        "fifth of it, as there",
    )


class RepetitionConfig(Section):
    """A penalty of repeated n-grams."""

    weight: float = Field(0.0, ge=0, description="weight of the share of n-grams that repeat an earlier one; 0: off")
    ngram: int = Field(4, gt=0, description="tokens of an n-gram")


class RewardModelConfig(Section):
    """A reward model behind an SGLang server."""

    url: str = Field(pattern="^https?://", description="an SGLang server with a reward head and the policy's tokenizer")
    weight: float = Field(1.0, description="weight of its score in the reward")
    api_key_env: str | None = Field(
        None, description="environment variable that holds the server's API key; null: none"
    )
    timeout_s: float = Field(30.0, gt=0, description="time limit of one call for one group, in seconds")
    retries: int = Field(2, ge=0, description="retries when there is no answer, or the status is 429 or 500 and above")


class StepModelConfig(RewardModelConfig):
    """A process reward model, which scores the response up to the end of each step."""

    separator: str = Field("\n\n", min_length=1, description="text that ends a step; the response's end ends the last")


class CodeConfig(Section):
    """Tests that the Python code of a response must pass; it runs in its own Linux namespaces."""

    weight: float = Field(1.0, description="weight of the tests' result in the reward")
    tests: str = Field("tests", description="data column: asserts, a list of them, or a list of {input, output}")
    partial: bool = Field(False, description="true: score the share of passed tests; false: 1 if all pass, else 0")
    isolation: Literal["required", "best_effort"] = Field(
        "required", description="if the kernel allows no namespaces: refuse to start, or run with limits only"
    )
    parallel: int = Field(4, gt=0, description="programs that run at one time on one rank")
    timeout_s: float = Field(5.0, gt=0, description="time limit of all tests of one response, in seconds")
    memory_bytes: int = Field(512 * 2**20, gt=0, description="address space of each process of a program")
    output_bytes: int = Field(2**20, gt=0, description="the largest file a program may write, its output included")
    processes: int = Field(16, gt=0, description="processes and threads that one program may have")

    _unit = field_validator("memory_bytes", "output_bytes", mode="before")(as_bytes)


class CorrectnessRule(Section):
    """The rule for correct answers: those whose value of one term of the reward reaches a threshold."""

    term: str = Field(description="answer, code, model, another built-in term, or the name of a function")
    min_value: float = Field(1.0, description="value of the term, before its weight, from which an answer is correct")


class RewardConfig(Section):
    """The reward is a sum of terms, each with its weight; 0 leaves a term out."""

    answer: float = Field(
        0.0,
        description="weight of the math answer: 1 where it equals that of data.answer_column, by math-verify, else 0",
    )
    episode: float = Field(0.0, description="weight of the reward that rollout.function gives an episode")
    boxed: float = Field(0.0, description="weight of the format: 1 where the response has a \\boxed{} answer, else 0")
    boxed_answer: Literal["last", "first"] = Field("last", description="which \\boxed{} of a response is its answer")
    tolerance: float = Field(
        0.01,
        ge=0,
        description="difference between numbers that count as equal answers; below 1, relative to the expected number",
    )
    length: float = Field(0.0, description="weight of min(1, tokens / max_response_tokens); negative penalizes length")
    range: tuple[float, float] | None = Field(
        None,
        description="lowest and highest reward without penalties, which overlong is measured by; null: from 0 to the "
        "sum of the weights of answer, episode, boxed, model, code and functions, each of which is taken to be in 0 "
        "to 1",
    )
    overlong: OverlongConfig = Field(OverlongConfig(), description="penalty of responses near the length limit")
    repetition: RepetitionConfig = Field(RepetitionConfig(), description="penalty of repeated n-grams")
    model: RewardModelConfig | None = Field(None, description="a served reward model; null: none")
    code: CodeConfig | None = Field(None, description="run the response's code against tests; null: off")
    functions: dict[str, float] = Field(
        {},
        description="your own functions: 'module:function' or 'file.py:function' to its weight (TRL reward_funcs)",
    )
    steps: str | StepModelConfig | None = Field(
        None,
        description="what rewards single steps: 'module:function', 'file.py:function', {url} of a served model, or "
        "episode: the rewards that rollout.function gives segments; "
        "needs algorithm.advantage.level=process",
    )
    correct: CorrectnessRule | None = Field(
        None,
        description="which answers count as correct, in accuracy, filters and curriculum: a term's name, or {term, "
        "min_value}; null: answer, or code, if it has a weight, else none",
    )
    timeout_s: float = Field(30.0, gt=0, description="time limit of one call of a reward, in seconds")
    on_error: Literal["stop"] | float = Field(
        "stop", description="on a failing call: stop the run, or score this value"
    )

    @property
    def correctness_rule(self) -> CorrectnessRule | None:
        """Return the term and threshold by which an answer is correct; None where the reward has no such term."""
        candidates = (("answer", self.answer), ("code", self.code.weight if self.code else 0.0))
        return self.correct or next((CorrectnessRule(term=name) for name, weight in candidates if weight), None)

    @field_validator("correct", mode="before")
    @classmethod
    def _correct_from_name(cls, value: Any) -> Any:
        return {"term": value} if isinstance(value, str) else value

    @property
    def term_weights(self) -> dict[str, float]:
        """Return the built-in terms by name: those with a weight, and the one that says what is correct."""
        weights = {
            "answer": self.answer,
            "episode": self.episode,
            "boxed": self.boxed,
            "length": self.length,
            "overlong": self.overlong.weight * self.span / 2,
            "repetition": self.repetition.weight,
            **({"model": self.model.weight} if self.model else {}),
            **({"code": self.code.weight} if self.code else {}),
        }
        correct = self.correct.term if self.correct else None  # computed at weight 0, too
        return {name: weight for name, weight in weights.items() if weight or name == correct}

    @property
    def function_names(self) -> dict[str, str]:
        """Return the name of each function: what stands after its file, where nothing else has that name."""
        short = {path: path.rpartition(":")[2] for path in self.functions}
        counts = Counter([*short.values(), *self.term_weights, *[STEPS] * bool(self.steps)])
        return {path: name if counts[name] == 1 else path for path, name in short.items()}

    @property
    def has_outcome(self) -> bool:
        """Return whether anything rewards complete responses."""
        sections = (self.overlong, self.repetition, self.model, self.code)
        weights = [section.weight for section in sections if section]
        return any((self.answer, self.episode, self.boxed, self.length, *weights, self.functions))

    @property
    def span(self) -> float:
        """Return highest minus lowest reward, without penalties."""
        if self.range is not None:
            return self.range[1] - self.range[0]
        weights = [section.weight for section in (self.model, self.code) if section]
        return sum(map(abs, (self.answer, self.episode, self.boxed, *weights, *self.functions.values())))

    @field_validator("range")
    @classmethod
    def _range_ascends(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"{list(value)} is no range: write the lowest reward, then the highest")
        return value

    @model_validator(mode="after")
    def _overlong_has_a_range(self) -> "RewardConfig":
        if self.overlong.weight and not self.span:
            raise ValueError("reward.overlong scales with the range of the reward, which is 0 here: set reward.range")
        return self

    @model_validator(mode="after")
    def _correct_names_a_term(self) -> "RewardConfig":
        names = [*self.term_weights, *self.function_names.values()]
        if self.correct and self.correct.term not in names:
            raise ValueError(
                f"reward.correct: no term of the reward is named {self.correct.term!r}"
                f"{did_you_mean(self.correct.term, names)}; there are: {', '.join(names)}"
            )
        return self

    @model_validator(mode="after")
    def _some_reward(self) -> "RewardConfig":
        if not (self.has_outcome or self.steps):
            raise ValueError("no reward has a weight: set reward.answer, reward.boxed or reward.functions")
        return self
