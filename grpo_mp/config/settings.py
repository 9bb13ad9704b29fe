"""Settings of an RL run, and the checks across sections."""

from collections.abc import Iterator
from math import ceil
from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_mp.algorithms.distillation_settings import EVERY_SET, RIGHT_ANSWERS
from grpo_mp.algorithms.registries import needs_correctness, policy_loss_entry
from grpo_mp.algorithms.settings import AlgorithmConfig, KLConfig
from grpo_mp.config.data_sections import DataConfig, EvalSetConfig, SampleConfig
from grpo_mp.config.sections import (
    CriticConfig,
    EngineConfig,
    RolloutConfig,
    SyncConfig,
)
from grpo_mp.config.trainer_settings import TrainerSettings
from grpo_mp.config.truncation import MAX_KEPT
from grpo_mp.models.sparse_attention import INDEXER_LOSS
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import did_you_mean
from grpo_mp.utils.section import Section


class Settings(TrainerSettings):
    """All settings of a run."""

    schedule: Literal["colocated", "one_step_off", "async"] = Field(
        "colocated",
        description="colocated: the same ranks generate, then train; one_step_off: engines on engine.ranks "
        "generate the next step meanwhile; async: they generate all the time",
    )
    data: DataConfig = Field(description="train and eval prompts")
    rollout: RolloutConfig = Field(description="what a step generates")
    engine: EngineConfig = Field(EngineConfig(), description="the engines that generate")
    reward: RewardConfig = Field(description="terms of the reward and their weights")
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description="a preset by name, or its parts")
    critic: CriticConfig | None = Field(None, description="the value model of algorithm ppo; null: none")
    sync: SyncConfig = Field(SyncConfig(), description="weights from the trainer to the engines")
    sample: SampleConfig = Field(SampleConfig(), description="what `grpo-mp sample` keeps")

    @model_validator(mode="before")
    @classmethod
    def _set_staleness(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("schedule", "colocated") == "colocated":
            return values
        rollout = values.get("rollout")
        return values | {"rollout": {"max_staleness": 1} | rollout} if isinstance(rollout, dict) else values

    def problems(self) -> Iterator[str]:
        samples = self.samples_per_step
        updates = self.training.updates_per_step
        if samples % updates:
            yield (
                f"training.updates_per_step={updates} does not divide the {samples} samples of a step "
                "(rollout.prompts_per_step x rollout.group_size)"
            )
        yield from super().problems()
        kl = self.algorithm.kl
        if self.model.lora and kl.ref_update_every and kl.ref_update_mix < 1:
            yield (
                f"model.lora: kl.ref_update_mix={kl.ref_update_mix:g} would mix A and B, not what they add: set it to 1"
            )
        yield from self._replay_problems()
        yield from self._truncation_problems()
        yield from self._timeout_problems()
        yield from self._critic_problems()
        yield from self._reward_problems()
        yield from self._served_model_problems()
        yield from self._teacher_problems()
        yield from self._schedule_problems()
        yield from self._ahead_problems()
        yield from self._episode_problems()

    def _replay_problems(self) -> Iterator[str]:
        needed = self.algorithm.needs_old_logprobs(self.optimizer_steps_per_step)
        if self.training.router_replay == "R2" and not needed:
            yield (
                "training.router_replay=R2 replays the experts of the old-logprob pass, which this run does not make "
                "(algorithm.old_logprobs=engine, or one update a step): set R3 or none, or old_logprobs=recomputed "
                "with training.updates_per_step of 2 or more"
            )
        replay = self.training.router_replay
        if self.training.replays_engine and self.engine.speculative.algorithm != "none":
            yield (
                f"training.router_replay={replay} does not work with engine.speculative, because accepted tokens "
                "change their place in SGLang's cache: set engine.speculative.algorithm=none, or R2 or none"
            )
        if self.training.replays_engine and self.schedule == "async" and self.sync.pause == "retract":
            yield (
                f"training.router_replay={replay} replays the experts with which each token was sampled, and "
                "sync.pause=retract has SGLang choose them anew at every update: set sync.pause=in_place"
            )

    def _truncation_problems(self) -> Iterator[str]:
        truncation = self.rollout.truncation
        if not truncation.is_active:
            return
        distillation = self.algorithm.distillation
        if (truncation.top_k or 0) > MAX_KEPT:
            yield f"rollout.top_p.top_k={truncation.top_k}: an engine returns at most {MAX_KEPT} kept tokens: lower it"
        if truncation.min_p and self.engine.deterministic:
            yield "rollout.top_p.min_p: SGLang draws no seeded samples by min_p: leave it out, or deterministic=false"
        if self.engine.speculative.algorithm != "none":
            yield (
                "rollout.top_p truncates the distribution that is trained, and SGLang returns the kept tokens without "
                "speculative decoding only: set rollout.top_p=1 or engine.speculative.algorithm=none"
            )
        if distillation and distillation.topk:
            yield (
                "rollout.top_p truncates the policy's distribution, and algorithm.distillation.topk compares the whole "
                "one: set rollout.top_p=1 or distillation.topk=null"
            )

    def _timeout_problems(self) -> Iterator[str]:
        rollout = self.rollout
        phase_s = self.monitor.phase_timeout_s
        limits = {
            "rollout.group_timeout_s": rollout.group_timeout_s,
            "reward.timeout_s": self.reward.timeout_s,
            "rollout.limits.episode_s": rollout.limits.episode_s if rollout.rollout_function else 0.0,
        }
        for name, limit in limits.items():
            if phase_s < limit:
                yield (
                    f"monitor.phase_timeout_s={phase_s:g} is shorter than {name}={limit:g}, a wait inside it: raise it "
                    f"to {limit:g} or more"
                )

    @property
    def group_size_problem(self) -> str:
        """Return a sentence why the policy cannot learn from groups of this size, or an empty string."""
        advantage = self.algorithm.advantage
        distillation = self.algorithm.distillation
        compares = advantage.compares_groups and not advantage.estimator
        if self.rollout.group_size > 1 or not compares or (distillation and distillation.replaces_rewards):
            return ""
        return (
            f"rollout.group_size=1 leaves algorithm.advantage.baseline={advantage.baseline} nothing "
            "to compare with: set 2 or more, or algorithm: reinforce_pp"
        )

    def _critic_problems(self) -> Iterator[str]:
        baseline = self.algorithm.advantage.baseline
        of_critic = self.algorithm.advantage.of_critic
        if self.critic and not of_critic:
            yield (
                f"critic trains a value model, and algorithm.advantage.baseline={baseline} takes none: set algorithm: "
                "ppo, or leave critic out"
            )
        if of_critic and not self.critic:
            yield (
                "algorithm.advantage.baseline=critic takes the values of a critic, and critic is null: set it, e.g. "
                "critic={lr: 1e-5}"
            )
        if self.critic and self.model.lora:
            yield "critic beside model.lora has not been tested: set lora=null, or another algorithm than ppo"
        if self.run.steps and (problem := self.warmup_problem):
            yield problem

    @property
    def warmup_problem(self) -> str:
        """Return a sentence why the critic's warm-up does not fit `run.steps`, or an empty string."""
        warmup_steps = self.critic.warmup_steps if self.critic else 0
        if not warmup_steps or warmup_steps < self.run.steps:
            return ""
        return f"critic.warmup_steps={warmup_steps} leaves none of {self.run.steps} steps to the policy: lower it"

    def _reward_problems(self) -> Iterator[str]:
        terms = [*self.reward.built_in_weights, *self.reward.function_names.values()]
        for name, weights in self.data.set_weights.items():
            for term in weights.keys() - terms:
                yield (
                    f"data.train.{name}.reward: no term of the reward is named {term!r}{did_you_mean(term, terms)}; "
                    f"there are: {', '.join(terms)}; others are described in `reward`"
                )
            if self.algorithm.advantage.combine == "normalize":
                yield (
                    "algorithm.advantage.combine=normalize weighs terms alike in all sets: set combine=sum, or no "
                    f"data.train.{name}.reward"
                )
        rule = self.algorithm.filter
        is_known = self.reward.correct_term is not None
        if self.algorithm.curriculum.window and not is_known:
            yield (
                "algorithm.curriculum.window skips prompts that are answered right, and no reward term defines "
                "correctness: set reward.correct to the term that does, or window=0"
            )
        if policy_loss_entry(self.algorithm.policy_loss).needs_correctness and not is_known:
            yield (
                f"algorithm.policy_loss={self.algorithm.policy_loss} adds a loss on right answers, and no reward term "
                "defines correctness: set reward.correct to the term that does, or policy_loss=clip"
            )
        if rule.zero_std != "keep" and needs_correctness(rule.metric) and not is_known:
            yield (
                f"algorithm.filter.metric={rule.metric} drops groups that are all right or all wrong, and no reward "
                "term defines correctness: set reward.correct to the term that does, or metric=reward"
            )
        overlong = self.reward.overlong
        limit = self.rollout.max_response_tokens
        if overlong.weight and (overlong.buffer_tokens or 0) >= limit:
            yield (
                f"reward.overlong.buffer_tokens={overlong.buffer_tokens} is not below "
                f"rollout.max_response_tokens={limit}: lower it"
            )
        process = self.algorithm.advantage.level == "process"
        if process and not self.reward.steps:
            yield "advantage.level=process has no step rewards: set reward.steps, or level=outcome"
        if not process and self.reward.steps and not self.reward.has_outcome:
            yield "reward.steps gives no outcome reward: set algorithm=grpo_process, or reward.answer"

    def _served_model_problems(self) -> Iterator[str]:
        distillation = self.algorithm.distillation
        rule = self.algorithm.filter
        served = [f"reward.model.path={model.path}" for model in self.reward.own_models.values()]
        teachers = distillation.teachers if distillation else {}
        served += [
            f"algorithm.distillation.{name}.path={teacher.path}" for name, teacher in teachers.items() if teacher.folder
        ]
        for path in served if not self.shares_devices else ():
            yield (
                f"{path} is served in SCORE on the devices of all ranks, which schedule={self.schedule} has no "
                "phase for: set schedule=colocated, or serve it elsewhere and give its URL"
            )
        for name, model in self.reward.own_models.items():
            path = f"reward.model.path={model.path}"
            if name == self.reward.correct:
                yield (
                    f"reward.correct={name} decides in evaluations and filters, too, and {path} is asked in SCORE "
                    "alone: name another term, or serve the model elsewhere and give its URL"
                )
            if rule.zero_std != "keep" and not needs_correctness(rule.metric):
                yield (
                    f"algorithm.filter.metric={rule.metric} needs the whole reward while groups are generated, and "
                    f"{path} is asked in SCORE alone: set metric=accuracy or zero_std=keep, or serve the model "
                    "elsewhere and give its URL"
                )
        if distillation and distillation.teachers and self.rollout.temperature != 1:
            yield (
                "algorithm.distillation compares the policy's logprobs with the teacher's logprobs at temperature 1, "
                f"but rollout.temperature={self.rollout.temperature:g} changes the policy's: set rollout.temperature=1"
            )

    def _teacher_problems(self) -> Iterator[str]:
        distillation = self.algorithm.distillation
        if not distillation:
            return
        if RIGHT_ANSWERS in distillation.shown.values():
            path = "algorithm.distillation.teacher.path=self shows the policy another right answer of the group"
            if self.reward.correct_term is None:
                yield (
                    f"{path}, and no reward term defines correctness: set reward.correct to the term that does, or "
                    "path=self:COLUMN for a demonstration of the data"
                )
            if self.rollout.group_size == 1:
                yield f"{path}, and rollout.group_size=1 leaves no other: set 2 or more"
        if EVERY_SET in distillation.teacher:
            return
        sets = [*self.data.train]
        for name in distillation.teacher:
            if name not in sets:
                yield (
                    f"algorithm.distillation.teacher.{name}: data.train has no set of this name"
                    f"{did_you_mean(name, sets)}; there are: {', '.join(sets)}"
                )
        for name in sets:
            if name not in distillation.teacher:
                yield (
                    f"algorithm.distillation.teacher has no teacher for the set data.train.{name}: set "
                    f"teacher.{name}.path, or teacher.path alone, for a teacher of all sets"
                )

    def _schedule_problems(self) -> Iterator[str]:
        ranks = self.engine.ranks
        staleness = self.rollout.max_staleness
        if self.shares_devices and ranks:
            yield (
                f"engine.ranks={ranks} keeps ranks for engines alone, and schedule=colocated lets all of them "
                "train: set schedule=one_step_off or async, or engine.ranks=0"
            )
        if not self.shares_devices and (not ranks or ranks % self.engine.gpus_per_engine):
            yield (
                f"schedule={self.schedule} needs ranks for the engines alone: set engine.ranks, now {ranks}, to a "
                f"multiple of engine.gpus_per_engine={self.engine.gpus_per_engine}"
            )
        if not self.shares_devices and (not staleness or (self.schedule == "one_step_off" and staleness > 1)):
            rule = "is 1" if self.schedule == "one_step_off" else "is at least 1"
            yield f"rollout.max_staleness={staleness}: with schedule={self.schedule} it {rule}: leave it out"
        if staleness and self.algorithm.filter.oversample_factor > 1:
            yield (
                f"rollout.max_staleness={staleness} keeps what a step launches for later ones, in launch order: set "
                "algorithm.filter.oversample_factor=1, or max_staleness=0"
            )

    def _ahead_problems(self) -> Iterator[str]:
        ahead = self.rollout.tokens_ahead
        least = self.engine.speculative.verified_tokens + 1
        if ahead and not self.steps_ahead:
            staleness = 1 if self.shares_devices else 2
            yield (
                f"rollout.tokens_ahead={ahead}, and no step begins groups of a later one: set rollout.max_staleness="
                f"{staleness} or more{'' if self.shares_devices else ' with schedule=async'}, or leave it out"
            )
        if ahead and ahead < least:
            last = "the last one is" if least == 2 else f"the last {least - 1} are"
            yield f"rollout.tokens_ahead={ahead}: set {least} or more, {last} drawn again"

    def _episode_problems(self) -> Iterator[str]:
        rollout = self.rollout
        if rollout.tools and not rollout.tool_parser:
            yield (
                "rollout.tools needs rollout.tool_parser, the name by which SGLang knows how the model writes calls: "
                "set qwen25, deepseekv3, glm45, kimi_k2, llama3, or what the model's page says"
            )
        if rollout.rollout_function and rollout.max_staleness and self.shares_devices:
            yield (
                f"rollout.max_staleness={rollout.max_staleness} with schedule=colocated pauses what is unfinished, and "
                "an episode of several turns cannot be paused: set max_staleness=0, or schedule=async or one_step_off"
            )
        if self.reward.episode and not rollout.rollout_function:
            yield "reward.episode weighs what rollout.function gives, and there is none: set it, or episode=0"

    @property
    def shares_devices(self) -> bool:
        return self.schedule == "colocated"

    @property
    def steps_ahead(self) -> int:
        """Return how many steps ahead of its own step a group may start, if weights are fixed while groups run."""
        return self.rollout.max_staleness - (not self.shares_devices)

    @property
    def updates_running_groups(self) -> bool:
        """Return whether a weight sync updates engines while they generate; otherwise groups end or pause before it."""
        return self.schedule == "async" and self.rollout.tokens_ahead is None

    @property
    def keeps_former_weights(self) -> bool:
        """Return whether the host keeps the weights before an update, for engines that still generate with them."""
        return self.engine.deterministic and not self.shares_devices and not self.updates_running_groups

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.training.updates_per_step * self.training.epochs

    @property
    def total_updates(self) -> int:
        warmup_steps = self.critic.warmup_steps if self.critic else 0
        return (self.run.steps - warmup_steps) * self.optimizer_steps_per_step

    def for_critic(self) -> "Settings":
        """Return settings in which the critic takes the place of the policy, so that the same code builds it."""
        if self.critic is None:
            raise ValueError("the settings have no critic")
        megatron_args = {name: value for name, value in self.training.megatron_args.items() if name != INDEXER_LOSS}
        model = {"path": self.critic.path or self.model.path, "mtp_loss_scaling_factor": 0.0, "lora": None}
        return self.model_copy(
            update={
                "model": self.model.model_copy(update=model),
                "optimizer": self.optimizer.model_copy(update={"lr": self.critic.lr}),
                "training": self.training.model_copy(update={"router_replay": "none", "megatron_args": megatron_args}),
                "critic": None,
            }
        )

    def without_training(self) -> "Settings":
        """Return the settings of a job that only generates: all ranks host engines, without critic and reference."""
        updates = {
            "schedule": "colocated",
            "engine": self.engine.model_copy(update={"ranks": 0}),
            "rollout": self.rollout.model_copy(update={"max_staleness": 0}),
            "critic": None,
            "algorithm": self.algorithm.model_copy(update={"kl": KLConfig()}),
            "training": self.training.model_copy(update={"router_replay": "none"}),
        }
        return self.model_copy(update=updates)

    def for_replay(self) -> "Settings":
        """Return the settings of a replay: no engines, and all ranks train."""
        engine = self.engine.model_copy(update={"ranks": 0})
        return self.model_copy(update={"schedule": "colocated", "engine": engine})

    def for_sampling(self) -> "Settings":
        """Return the settings of `grpo-mp sample`, which answers the train prompts without training."""
        settings = self.without_training()
        return settings.model_copy(update={"data": settings.data.model_copy(update={"eval": {}})})

    def with_steps(self, prompts: int) -> "Settings":
        """Return the settings with `run.steps` computed from `run.epochs`, unless it is set. `prompts`: per epoch."""
        if self.run.steps or self.run.epochs is None:
            return self
        steps = ceil(round(self.run.epochs * prompts / self.rollout.prompts_per_step, 6))
        return self.model_copy(update={"run": self.run.model_copy(update={"steps": steps})})

    @property
    def temperature(self) -> float:
        return self.rollout.temperature

    @property
    def bucket_bytes(self) -> int | None:
        return self.sync.bucket_bytes

    @property
    def step_summary(self) -> str:
        """Return a sentence with the numbers of samples and updates in a step."""
        rollout = self.rollout
        training = self.training
        updates = self.optimizer_steps_per_step
        return (
            f"a step: {rollout.prompts_per_step} prompts x {rollout.group_size} = {self.samples_per_step:,} samples, "
            f"{updates} update{'s' * (updates > 1)} of {self.samples_per_step // training.updates_per_step:,}"
            f"{f' in {training.epochs} passes' * (training.epochs > 1)}"
        )

    @property
    def eval_sets(self) -> dict[str, EvalSetConfig]:
        """Return the evaluation sets; sampling settings of a set that are null are those of `rollout`."""
        rollout = self.rollout
        return {
            name: eval_set.model_copy(
                update={
                    "temperature": rollout.temperature if eval_set.temperature is None else eval_set.temperature,
                    "top_p": eval_set.top_p or rollout.top_p,
                    "max_response_tokens": eval_set.max_response_tokens or rollout.max_response_tokens,
                }
            )
            for name, eval_set in self.data.eval.items()
        }

    @property
    def max_request_tokens(self) -> int:
        """Return the maximum number of tokens of prompt and response together, in training and evaluation."""
        limits = (eval_set.max_response_tokens or 0 for eval_set in self.data.eval.values())
        return self.rollout.max_prompt_tokens + max([self.rollout.max_response_tokens, *limits])


def default_value(name: str, root: type[Section] = Settings) -> Any:
    """Return the default of a setting by its dotted name, or None if it is required or unknown."""
    section: Any = root
    *path, last = name.split(".")
    for part in path:
        field = section.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, Section)):
            return None
        section = field.annotation
    field = section.model_fields.get(last)
    return None if field is None or field.is_required() else field.get_default()
