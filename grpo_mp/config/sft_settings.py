"""Settings of supervised fine-tuning: sections shared with RL, chat data, batch size and loss."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_mp.algorithms.settings import AlgorithmConfig, KLConfig
from grpo_mp.config.data_sections import DataConfig, NamedSets, SetConfig, SourceName, TemplateVariables, TrainSetConfig
from grpo_mp.config.sections import EngineConfig, RolloutConfig, SyncConfig, TrainingConfig
from grpo_mp.config.settings import Settings
from grpo_mp.config.trainer_settings import TrainerSettings
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.section import Section

OF_RL = ("rollout", "engine", "reward", "algorithm", "sync", "schedule")  # sections that only RL has
TRAINING_OF_RL = ("updates_per_step", "epochs", "shuffle", "share_prompts", "router_replay")


class ChatSetConfig(SetConfig):
    """A set of chats."""

    weight: float = Field(1.0, gt=0, description="share of the samples, relative to the other sets")


class ChatDataConfig(NamedSets):
    """Chats to learn from and to evaluate on, and their columns: rows have messages, or a prompt and a completion."""

    train: dict[str, ChatSetConfig] = Field(
        min_length=1,
        description="file (JSONL, JSON, Parquet), `datasets` name or `name:split`; or sets by name: {NAME: "
        "{path, weight, ...}}",
    )
    eval: dict[str, SetConfig] = Field(
        {}, description="held-out sets, whose loss is measured, by name: a file or `datasets` name"
    )
    source: SourceName | None = Field(
        None, description="reader: jsonl, parquet, datasets, or your own 'file.py:function'; null: by the file's suffix"
    )
    messages_column: str = Field("messages", description="column of a chat: a list of messages with role and content")
    prompt_column: str = Field(
        "prompt", description="column of the prompt in rows without messages: text or chat messages"
    )
    completion_column: str = Field("completion", description="column of the completion: text or chat messages")
    system_prompt: str | None = Field(
        None, description="system message before every chat that begins with none; null: none"
    )
    chat_template_kwargs: TemplateVariables = Field({})
    shuffle: bool = Field(True, description="reorder the samples in each epoch; false: order of the file")


class SftConfig(Section):
    """Size of a step, and which parts of a chat have a loss."""

    batch_size: int = Field(gt=0, description="samples of a step over all ranks")
    max_tokens: int = Field(gt=0, description="tokens of the longest sample (TRL max_length)")
    too_long: Literal["drop", "truncate", "refuse"] = Field(
        "drop",
        description="longer samples. drop: left out; truncate: cut at the end (TRL); refuse: the run does not start",
    )
    loss_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="tokens with a loss. assistant: all assistant turns, or the completion (TRL "
        "assistant_only_loss, completion_only_loss); last: the last turn; all: every token. A "
        "message with weight: 0 has none",
    )


class SftSettings(TrainerSettings):
    """All settings of supervised fine-tuning."""

    data: ChatDataConfig = Field(description="chats to learn from and to evaluate on")
    sft: SftConfig = Field(description="samples of a step, and the tokens that have a loss")

    @model_validator(mode="before")
    @classmethod
    def _refuse_sections_of_rl(cls, values: Any) -> Any:
        for name in OF_RL:
            if isinstance(values, dict) and name in values:
                raise ValueError(
                    f"{name} belongs to RL, and supervised fine-tuning has no engines and no rewards: remove it, "
                    "or run `grpo-mp train`"
                )
        return values

    def problems(self) -> Iterator[str]:
        for name in TRAINING_OF_RL:
            if vars(self.training)[name] != TrainingConfig.model_fields[name].default:
                yield (
                    f"training.{name}={vars(self.training)[name]} belongs to RL: a step of supervised fine-tuning is "
                    "one update of sft.batch_size samples, and run.epochs are its passes over the data: leave it out"
                )
        yield from super().problems()

    def step_samples(self, epoch_size: int, samples_seen: int) -> int:
        """Return the number of samples of the next step; the last step of the last epoch may be smaller."""
        left = round(self.run.epochs * epoch_size) - samples_seen if self.run.epochs else 0
        return min(self.sft.batch_size, left) if left > 0 else self.sft.batch_size

    def as_trainer_of_rl(self) -> Settings:
        """Return settings, not validated, of an RL job whose trainer has the work of this one, for the planner.

        A sample is a prompt of one token and a response; the engines have ranks of their own.
        """
        shared = {name: getattr(self, name) for name in TrainerSettings.model_fields}
        return Settings.model_construct(
            schedule="one_step_off",
            data=DataConfig(train={"train": TrainSetConfig(path="unused")}),
            rollout=RolloutConfig(
                prompts_per_step=self.sft.batch_size,
                group_size=1,
                max_prompt_tokens=1,
                max_response_tokens=max(1, self.sft.max_tokens - 1),
            ),
            engine=EngineConfig(),
            reward=RewardConfig(answer=1.0),
            algorithm=AlgorithmConfig(kl=KLConfig(coef=0.0)),
            sync=SyncConfig(),
            **shared,
        )

    def with_steps(self, epoch_size: int, steps_done: int = 0, samples_seen: int = 0) -> "SftSettings":
        """Return the settings with `run.steps` computed from `run.epochs`.

        `epoch_size`: samples of an epoch. `steps_done`, `samples_seen`: progress of a resumed run. Its last step may
        have been smaller than `sft.batch_size`, if an earlier job ended with the rest of an epoch.
        """
        if not self.run.epochs:
            return self
        left = max(0, round(self.run.epochs * epoch_size) - samples_seen)
        steps = steps_done + -(-left // self.sft.batch_size)
        run = self.run.model_copy(update={"steps": min(steps, self.run.steps or steps)})
        return self.model_copy(update={"run": run})
