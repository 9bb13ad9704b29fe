"""Settings of an RL run, and the checks across sections."""

from math import ceil
from typing import Any, Literal

from pydantic import Field, model_validator

from grpo_mp.algorithms.registries import needs_correctness
from grpo_mp.algorithms.settings import AlgorithmConfig, KLConfig, needs_old_logprobs
from grpo_mp.config.data_sections import DataConfig, EvalSetConfig, SampleConfig
from grpo_mp.config.sections import (
    CriticConfig,
    EngineConfig,
    LayoutConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
    TrainingConfig,
)
from grpo_mp.config.trainer_settings import check_training
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.utils.errors import did_you_mean
from grpo_mp.utils.section import Section

MAX_TOPK_VALUES = 2**24  # a teacher's logprobs for a response, which arrive in one reply of 180 MB


class Settings(Section):
    """All settings of a run."""

    schedule: Literal["colocated", "one_step_off", "async"] = Field(
        "colocated",
        description="colocated: the same ranks generate, then train; one_step_off: engines on engine.ranks "
        "generate the next step meanwhile; async: they generate all the time",
    )
    run: RunConfig = Field(description="folder, length, checkpoints and evaluations of the run")
    model: ModelConfig = Field(description="the policy and its reference")
    layout: LayoutConfig = Field(LayoutConfig(), description="parallelism of the trainer")
    data: DataConfig = Field(description="train and eval prompts")
    rollout: RolloutConfig = Field(description="what a step generates")
    engine: EngineConfig = Field(EngineConfig(), description="the engines that generate")
    reward: RewardConfig = Field(description="terms of the reward and their weights")
    algorithm: AlgorithmConfig = Field(AlgorithmConfig(), description="a preset by name, or its parts")
    critic: CriticConfig | None = Field(None, description="the value model of algorithm ppo; null: none")
    optimizer: OptimizerConfig = Field(description="AdamW and its learning rate")
    training: TrainingConfig = Field(TrainingConfig(), description="updates of a step, micro-batches, memory, Megatron")
    sync: SyncConfig = Field(SyncConfig(), description="weights from the trainer to the engines")
    monitor: MonitorConfig = Field(MonitorConfig(), description="metrics, logs and time limits")
    sample: SampleConfig = Field(SampleConfig(), description="what `grpo-mp sample` keeps")

    @model_validator(mode="after")
    def _check_updates_divide_samples(self) -> "Settings":
        samples, updates = self.samples_per_step, self.training.updates_per_step
        if samples % updates:
            raise ValueError(
                f"training.updates_per_step={updates} does not divide the {samples} samples of a step "
                "(rollout.prompts_per_step x rollout.group_size)"
            )
        return self

    @model_validator(mode="after")
    def _check_training(self) -> "Settings":
        check_training(self)
        kl = self.algorithm.kl
        if self.model.lora and kl.ref_update_every and kl.ref_update_mix < 1:
            raise ValueError(
                f"model.lora: kl.ref_update_mix={kl.ref_update_mix:g} would mix A and B, not what they add: set it to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_router_replay(self) -> "Settings":
        needed = needs_old_logprobs(self.algorithm, self.optimizer_steps_per_step)
        if self.training.router_replay == "R2" and not needed:
            raise ValueError(
                "training.router_replay=R2 replays the experts of the old-logprob pass, which this run does not make "
                "(algorithm.old_logprobs=engine, or one update a step): set R3 or none, or old_logprobs=recomputed "
                "with training.updates_per_step of 2 or more"
            )
        if self.training.router_replay == "R3" and self.schedule == "async" and self.sync.pause == "retract":
            raise ValueError(
                "training.router_replay=R3 replays the experts with which each token was sampled, and "
                "sync.pause=retract has SGLang choose them anew at every update: set sync.pause=in_place"
            )
        return self

    @model_validator(mode="after")
    def _check_timeouts(self) -> "Settings":
        phase = "monitor.phase_timeout_s"
        limits = {
            "rollout.group_timeout_s": self.rollout.group_timeout_s,
            "reward.timeout_s": self.reward.timeout_s,
            phase: self.monitor.phase_timeout_s,
        }
        if self.rollout.rollout_function:
            limits["rollout.limits.episode_s"] = self.rollout.limits.episode_s
        if self.reward.judge:
            limits["reward.judge.timeout_s with retries"] = self.reward.judge.longest_s
        for name, limit in limits.items():
            if limits[phase] < limit:
                raise ValueError(
                    f"{phase}={limits[phase]:g} is shorter than {name}={limit:g}, a wait inside it: raise it to "
                    f"{limit:g} or more"
                )
        return self

    @property
    def group_size_problem(self) -> str:
        """Return a sentence why the policy cannot learn from groups of this size, or an empty string."""
        advantage, distillation = self.algorithm.advantage, self.algorithm.distillation
        compares = advantage.compares_groups and not advantage.estimator
        if self.rollout.group_size > 1 or not compares or (distillation and distillation.replaces_rewards):
            return ""
        return (
            f"rollout.group_size=1 leaves algorithm.advantage.baseline={advantage.baseline} nothing "
            "to compare with: set 2 or more, or algorithm: reinforce_pp"
        )

    @model_validator(mode="after")
    def _check_critic(self) -> "Settings":
        baseline = self.algorithm.advantage.baseline
        if self.critic and not self.algorithm.advantage.of_critic:
            raise ValueError(
                f"critic trains a value model, and algorithm.advantage.baseline={baseline} takes none: set algorithm: "
                "ppo, or leave critic out"
            )
        if self.algorithm.advantage.of_critic and not self.critic:
            raise ValueError(
                "algorithm.advantage.baseline=critic takes the values of a critic, and critic is null: set it, e.g. "
                "critic={lr: 1e-5}"
            )
        places_mtp = self.model.trains_mtp and "pipeline_model_parallel_layout" in self.training.megatron_args
        if self.critic and places_mtp:
            raise ValueError(
                "training.megatron_args.pipeline_model_parallel_layout places a multi-token-prediction layer, which a "
                "critic lacks: leave it out, or set mtp_loss_scaling_factor=0"
            )
        if self.critic and self.model.lora:
            raise ValueError(
                "critic beside model.lora has not been tested: set lora=null, or another algorithm than ppo"
            )
        if self.run.steps and (problem := self.warmup_problem):
            raise ValueError(problem)
        return self

    @property
    def warmup_problem(self) -> str:
        """Return a sentence why the critic's warm-up does not fit `run.steps`, or an empty string."""
        warmup_steps = self.critic.warmup_steps if self.critic else 0
        if not warmup_steps or warmup_steps < self.run.steps:
            return ""
        return f"critic.warmup_steps={warmup_steps} leaves none of {self.run.steps} steps to the policy: lower it"

    @model_validator(mode="after")
    def _check_rewards_of_sets(self) -> "Settings":
        terms = [*self.reward.built_in_weights, *self.reward.function_names.values()]
        for name, weights in self.set_weights.items():
            for term in weights.keys() - terms:
                raise ValueError(
                    f"data.train.{name}.reward: no term of the reward is named {term!r}{did_you_mean(term, terms)}; "
                    f"there are: {', '.join(terms)}; others are described in `reward`"
                )
            if not any(weights.values()):
                raise ValueError(f"data.train.{name}.reward: no term has a weight: name one, or set null")
        if self.set_weights and self.algorithm.advantage.combine == "normalize":
            raise ValueError(
                "algorithm.advantage.combine=normalize weighs terms alike in all sets: set combine=sum, or no "
                f"data.train.{next(iter(self.set_weights))}.reward"
            )
        return self

    @model_validator(mode="after")
    def _check_own_reward_models(self) -> "Settings":
        rule = self.algorithm.filter
        for name, model in self.reward.own_models.items():
            path = f"reward.model.path={model.path}"
            if not self.shares_devices:
                raise ValueError(
                    f"{path} is served in SCORE on the devices of all ranks, which schedule={self.schedule} has no "
                    f"phase for: set schedule=colocated, or serve it elsewhere and give its URL"
                )
            if name == "model" and self.reward.correct == name:
                raise ValueError(
                    f"reward.correct={name} decides in evaluations and filters, too, and {path} is asked in SCORE "
                    "alone: name another term, or serve the model elsewhere and give its URL"
                )
            if rule.zero_std != "keep" and not needs_correctness(rule.metric):
                raise ValueError(
                    f"algorithm.filter.metric={rule.metric} needs the whole reward while groups are generated, and "
                    f"{path} is asked in SCORE alone: set metric=accuracy or zero_std=keep, or serve the model "
                    "elsewhere and give its URL"
                )
        return self

    @model_validator(mode="after")
    def _check_distillation(self) -> "Settings":
        distillation, temperature = self.algorithm.distillation, self.rollout.temperature
        if distillation is None:
            return self
        section = "algorithm.distillation"
        if distillation.teacher.folder and not self.shares_devices:
            raise ValueError(
                f"{section}.teacher.path={distillation.teacher.path} is served in SCORE on the devices of all "
                f"ranks, which schedule={self.schedule} has no phase for: set schedule=colocated, or serve it "
                "elsewhere and give its URL"
            )
        values = (distillation.topk or 0) * self.rollout.max_response_tokens
        if values > MAX_TOPK_VALUES:
            raise ValueError(
                f"{section}.topk={distillation.topk} of rollout.max_response_tokens={self.rollout.max_response_tokens} "
                f"are {values:,} logprobs of one response, above the limit of {MAX_TOPK_VALUES:,}: lower one of them"
            )
        if temperature != 1:
            raise ValueError(
                f"{section} compares logprobs with those of a teacher at temperature 1, and rollout.temperature="
                f"{temperature:g} samples from others: set rollout.temperature=1"
            )
        return self

    @property
    def set_weights(self) -> dict[str, dict[str, float]]:
        return {name: one.reward for name, one in self.data.train.items() if one.reward is not None}

    @model_validator(mode="after")
    def _check_correct_is_known(self) -> "Settings":
        curriculum = self.algorithm.curriculum
        if curriculum.window and self.reward.correct_term is None:
            raise ValueError(
                "algorithm.curriculum.window skips prompts that are answered right, and no reward term defines "
                "correctness: set reward.correct to the term that does, or window=0"
            )
        rule = self.algorithm.filter
        if rule.zero_std != "keep" and needs_correctness(rule.metric) and self.reward.correct_term is None:
            raise ValueError(
                f"algorithm.filter.metric={rule.metric} drops groups that are all right or all wrong, and no reward "
                "term defines correctness: set reward.correct to the term that does, or metric=reward"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _set_staleness(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("schedule", "colocated") == "colocated":
            return values
        rollout = values.get("rollout")
        return values | {"rollout": {"max_staleness": 1} | rollout} if isinstance(rollout, dict) else values

    @model_validator(mode="after")
    def _check_schedule(self) -> "Settings":
        ranks, staleness = self.engine.ranks, self.rollout.max_staleness
        if self.schedule == "colocated":
            if ranks:
                raise ValueError(
                    f"engine.ranks={ranks} keeps ranks for engines alone, and schedule=colocated lets all of them "
                    "train: set schedule=one_step_off or async, or engine.ranks=0"
                )
            return self
        if not ranks or ranks % self.engine.gpus_per_engine:
            raise ValueError(
                f"schedule={self.schedule} needs ranks for the engines alone: set engine.ranks, now {ranks}, to a "
                f"multiple of engine.gpus_per_engine={self.engine.gpus_per_engine}"
            )
        if not staleness or (self.schedule == "one_step_off" and staleness > 1):
            rule = "is 1" if self.schedule == "one_step_off" else "is at least 1"
            raise ValueError(
                f"rollout.max_staleness={staleness}: with schedule={self.schedule} it {rule}: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> "Settings":
        rule = self.algorithm.filter
        if self.rollout.max_staleness and rule.oversample_factor > 1:
            raise ValueError(
                f"rollout.max_staleness={self.rollout.max_staleness} keeps what a step launches for later ones, in "
                "launch order: set algorithm.filter.oversample_factor=1, or max_staleness=0"
            )
        return self

    @model_validator(mode="after")
    def _check_tokens_ahead(self) -> "Settings":
        ahead, least = self.rollout.tokens_ahead, self.engine.speculative.verified_tokens + 1
        if ahead is None:
            return self
        if not self.steps_ahead:
            staleness = 1 if self.shares_devices else 2
            raise ValueError(
                f"rollout.tokens_ahead={ahead}, and no step begins groups of a later one: set rollout.max_staleness="
                f"{staleness} or more{'' if self.shares_devices else ' with schedule=async'}, or leave it out"
            )
        if ahead < least:
            last = "the last one is" if least == 2 else f"the last {least - 1} are"
            raise ValueError(f"rollout.tokens_ahead={ahead}: set {least} or more, {last} drawn again")
        return self

    @model_validator(mode="after")
    def _check_episodes(self) -> "Settings":
        rollout = self.rollout
        if rollout.tools and not rollout.tool_parser:
            raise ValueError(
                "rollout.tools needs rollout.tool_parser, the name by which SGLang knows how the model writes calls: "
                "set qwen25, deepseekv3, glm45, kimi_k2, llama3, or what the model's page says"
            )
        if rollout.rollout_function and rollout.max_staleness and self.shares_devices:
            raise ValueError(
                f"rollout.max_staleness={rollout.max_staleness} with schedule=colocated pauses what is unfinished, and "
                "an episode of several turns cannot be paused: set max_staleness=0, or schedule=async or one_step_off"
            )
        if self.reward.episode and not rollout.rollout_function:
            raise ValueError(
                "reward.episode weighs what rollout.function gives, and there is none: set it, or episode=0"
            )
        return self

    @model_validator(mode="after")
    def _check_overlong_buffer(self) -> "Settings":
        overlong, limits = self.reward.overlong, {"rollout": self.rollout.max_response_tokens}
        limits |= {
            f"data.eval.{name}": one.max_response_tokens or limits["rollout"] for name, one in self.data.eval.items()
        }
        for section, limit in limits.items():
            if overlong.weight and overlong.buffer_tokens is not None and overlong.buffer_tokens >= limit:
                raise ValueError(
                    f"reward.overlong.buffer_tokens={overlong.buffer_tokens} is not below "
                    f"{section}.max_response_tokens={limit}: lower it"
                )
        return self

    @model_validator(mode="after")
    def _check_step_rewards(self) -> "Settings":
        process = self.algorithm.advantage.level == "process"
        if process and not self.reward.steps:
            raise ValueError("advantage.level=process has no step rewards: set reward.steps, or level=outcome")
        if not process and self.reward.steps and not self.reward.has_outcome:
            raise ValueError("reward.steps gives no outcome reward: set algorithm=grpo_process, or reward.answer")
        return self

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
        """Return the number of optimizer updates of the policy in the whole run."""
        warmup_steps = self.critic.warmup_steps if self.critic else 0
        return (self.run.steps - warmup_steps) * self.optimizer_steps_per_step

    def for_critic(self) -> "Settings":
        """Return settings in which the critic takes the place of the policy, so that the same code builds it."""
        if self.critic is None:
            raise ValueError("the settings have no critic")
        model: dict[str, Any] = {
            "path": self.critic.path or self.model.path,
            "mtp_loss_scaling_factor": 0.0,
        }
        return self.model_copy(
            update={
                "model": self.model.model_copy(update=model | {"lora": None}),
                "optimizer": self.optimizer.model_copy(update={"lr": self.critic.lr}),
                "training": self.training.model_copy(update={"router_replay": "none"}),
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

    def eval_set(self, name: str) -> EvalSetConfig:
        """Return an evaluation set with its sampling settings; those that are null are taken from `rollout`."""
        eval_set, rollout = self.data.eval[name], self.rollout
        return eval_set.model_copy(
            update={
                "temperature": rollout.temperature if eval_set.temperature is None else eval_set.temperature,
                "top_p": eval_set.top_p or rollout.top_p,
                "max_response_tokens": eval_set.max_response_tokens or rollout.max_response_tokens,
                "max_prompts": eval_set.max_prompts,
            }
        )

    @property
    def max_request_tokens(self) -> int:
        """Return the maximum number of tokens of prompt and response together, in training and evaluation."""
        limits = (self.eval_set(name).max_response_tokens for name in self.data.eval)
        return self.rollout.max_prompt_tokens + max(filter(None, [self.rollout.max_response_tokens, *limits]))


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
