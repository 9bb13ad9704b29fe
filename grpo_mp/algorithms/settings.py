"""The `algorithm` section: independent parts, each with its choices. A preset (presets.yaml) sets any of them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.presets import CORRECTIONS, PRESETS
from grpo_mp.algorithms.registries import (
    ADVANTAGE_ESTIMATORS,
    CURRICULA,
    GROUP_FILTERS,
    POLICY_LOSSES,
    policy_loss_entry,
)
from grpo_mp.utils.errors import did_you_mean
from grpo_mp.utils.section import Section

RatioLevel = Literal["token", "sequence", "sequence_token", "product"]
MaskName = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: Annotated[str, AfterValidator(ADVANTAGE_ESTIMATORS.check_name)] | None = Field(
        None,
        description="pass_at_k (arXiv 2503.19595, verl grpo_passk), roles (of episodes), or your own "
        "'file.py:function'; null: by level and combine",
    )
    level: Literal["outcome", "process"] = Field(
        "outcome", description="outcome: one advantage for each response; process: rewards of steps (reward.steps)"
    )
    baseline: Literal["group_mean", "leave_one_out", "optimal_token", "none", "critic"] = Field(
        "group_mean",
        description="value subtracted from a reward: mean of the group, of its other samples (RLOO), the optimal one "
        "at each token (arXiv 2602.07078), none, or the critic's values by GAE (verl adv_estimator gae)",
    )
    scale: Literal["group_std", "batch_std", "group_mean", "none"] = Field(
        "group_std",
        description="what the difference is divided by (TRL scale_rewards); group_mean: MaxRL; none: Dr. GRPO",
    )
    combine: Literal["sum", "normalize"] = Field(
        "sum", description="several rewards: summed by weight, or first normalized in the group (GDPO)"
    )
    whiten: bool = Field(False, description="normalize over all response tokens of the step (REINFORCE++)")

    @property
    def of_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def compares_groups(self) -> bool:
        return self.baseline in ("group_mean", "leave_one_out", "optimal_token")

    @property
    def of_tokens(self) -> bool:
        return self.baseline == "optimal_token"

    @property
    def built_in(self) -> str:
        outcome = "decoupled" if self.combine == "normalize" else "outcome"
        return f"grpo_mp.algorithms.advantages:estimate_{'process' if self.level == 'process' else outcome}"


class ClipConfig(Section):
    """Bounds of the importance ratio. DAPO raises only high (clip higher)."""

    low: float = Field(
        0.2, gt=0, description="ratios below 1 - low are clipped; 1 or more: none (TRL epsilon, verl clip_ratio_low)"
    )
    high: float = Field(
        0.2, gt=0, description="ratios above 1 + high are clipped (TRL epsilon_high, verl clip_ratio_high)"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="limit of the ratio at negative advantages (TRL delta, verl clip_ratio_c); null: none"
    )


class KLConfig(Section):
    """The KL divergence of the policy from the reference, which starts as a copy of model.path."""

    coef: float = Field(0.0, ge=0, description="coefficient (TRL beta, verl kl_loss_coef); 0: no reference")
    estimator: Literal["k1", "k2", "k3", "k3_clamped", "k3_unbiased"] = Field(
        "k3", description="Schulman's estimators (verl kl_loss_type); k3 as DeepSeekMath, k3_unbiased as TRL"
    )
    apply_to: Literal["loss", "reward"] = Field(
        "loss", description="where it acts: added to the loss, or subtracted from the reward (verl use_kl_in_reward)"
    )
    level: Literal["token", "sequence"] = Field(
        "token", description="from the log ratio of a token, or of the full response (R1, eq. 2)"
    )
    target: float | None = Field(
        None,
        gt=0,
        description="target of an adaptive coef, in nats for each token (verl target_kl); null: constant coef",
    )
    ref_update_every: int = Field(
        0, ge=0, description="steps between updates of the reference (TRL ref_model_sync_steps); 0: never"
    )
    ref_update_mix: float = Field(
        0.6, gt=0, le=1, description="share of the policy in the updated reference (TRL ref_model_mixup_alpha)"
    )


class EntropyConfig(Section):
    """The entropy of the policy: a bonus in the loss, and which tokens learn."""

    coef: float = Field(0.0, ge=0, description="coefficient of the bonus (TRL entropy_coef, verl entropy_coeff)")
    target: float | None = Field(
        None, gt=0, description="target of an adaptive coef, in nats (TRL entropy_target); null: constant coef"
    )
    top_quantile: float = Field(
        1.0, gt=0, le=1, description="share of tokens with the highest entropy that learn (TRL top_entropy_quantile)"
    )


class RolloutCorrectionConfig(Section):
    """Importance weights old / rollout for the difference between policy and engine (verl rollout_correction)."""

    kind: Literal["none", "truncate", "mask"] = Field(
        "none", description="truncate: clamp the weights (TIS); mask: leave out tokens beyond the limits (MIS, IcePop)"
    )
    level: Literal["token", "sequence"] = Field(
        "token", description="level of the weights: of each token, or their product over the response"
    )
    low: float | None = Field(None, ge=0, description="lower limit of the weight; null: none")
    high: float | None = Field(None, gt=0, description="upper limit of the weight, 2 to 5 as a rule; null: none")
    masks: dict[MaskName, tuple[float, float]] = Field(
        {},
        description="drop tokens or responses outside of limits, named as verl's rollout_rs: {seq_mean_k1: [0.999, "
        "1.001], seq_max_k2: 0.05}; k1: limits of engine / policy; k2, k3: the largest estimate of their KL",
    )
    off_policy_mask_threshold: float | None = Field(
        None,
        gt=0,
        description="nats for each token beyond which responses with a negative advantage do not learn "
        "(DeepSeek-V3.2, TRL's name); null: all learn",
    )

    @field_validator("masks", mode="before")
    @classmethod
    def _pairs_of_limits(cls, masks: Any) -> Any:
        """Write a single limit as a pair: 1 / limit and limit of a ratio (k1), 0 and limit of a divergence."""
        if not isinstance(masks, dict):
            return masks
        single = (int, float)
        return {
            name: ((1 / limit if str(name).endswith("k1") else 0.0), limit)
            if isinstance(limit, single) and limit > 0
            else limit
            for name, limit in masks.items()
        }

    @field_validator("masks")
    @classmethod
    def _limits_in_order(cls, masks: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in masks.items():
            if low >= high or (name.endswith("k1") and low <= 0):
                raise ValueError(
                    f"{name}=[{low:g}, {high:g}]: give two limits, the lower one first, and above 0 for k1"
                )
        return masks


class EarlyStopConfig(Section):
    """Limits beyond which the remaining updates of a step are skipped."""

    max_kl: float | None = Field(
        None, gt=0, description="nats for each token between old policy and policy (PPO's target_kl); null: no limit"
    )


class FilterConfig(Section):
    """Which groups and samples a step trains on."""

    zero_std: Literal["keep", "drop", "refill"] = Field(
        "keep",
        description="groups with equal rewards: keep, drop, or replace (DAPO's dynamic sampling, verl filter_groups)",
    )
    metric: Annotated[str, AfterValidator(GROUP_FILTERS.check_name)] = Field(
        "reward", description="what must differ in a group: reward, accuracy (DAPO), or your own 'file.py:function'"
    )
    truncated: Literal["keep", "mask"] = Field(
        "keep", description="mask: truncated samples have no loss (TRL mask_truncated_completions)"
    )
    oversample_factor: float = Field(
        1.0,
        ge=1,
        description="groups launched for each group needed; the first that pass are used (slime "
        "--over-sampling-batch-size)",
    )


class CurriculumConfig(Section):
    """Prompts that the policy always solves, or that a function names, are skipped for a while."""

    window: int = Field(0, ge=0, description="last samplings of a prompt over which its solve rate is a mean; 0: off")
    min_rate: float = Field(0.0, ge=0, le=1, description="prompts with a lower solve rate are skipped")
    max_rate: float = Field(1.0, ge=0, le=1, description="prompts with a higher solve rate are skipped")
    function: Annotated[str | None, AfterValidator(lambda name: name and CURRICULA.check_name(name))] = Field(
        None, description="your own 'file.py:function', which names more prompts to skip; null: none"
    )

    @model_validator(mode="after")
    def _check_rates(self) -> "CurriculumConfig":
        if self.min_rate > self.max_rate:
            raise ValueError(
                f"min_rate={self.min_rate:g} is above max_rate={self.max_rate:g}: no prompt is between them"
            )
        if bool(self.window) != (self.min_rate > 0 or self.max_rate < 1):
            raise ValueError("window and min_rate or max_rate belong together: set both, or leave both out")
        return self


class AlgorithmConfig(Section):
    """The algorithm by its parts. `algorithm: dapo` selects a preset; any part of it can be overridden."""

    preset: str = Field("grpo", description="published algorithm (grpo_mp/algorithms/README.md), which sets defaults")
    advantage: AdvantageConfig = Field(AdvantageConfig(), description="how rewards become advantages")
    gamma: float = Field(1.0, gt=0, le=1, description="discount with a critic (TRL, verl gamma)")
    lam: Annotated[float, Field(ge=0, le=1)] | Literal["length_adaptive"] = Field(
        1.0,
        description="lambda of generalized advantage estimation with a critic (TRL, verl lam); below 1 only for short "
        "answers; length_adaptive: 1 - 20 / tokens of the answer, and 1 for the critic's returns (VAPO)",
    )
    ratio: RatioLevel = Field(
        "token",
        description="importance ratio of a token, a sequence (GSPO), GSPO-token, or the product over tokens (TRL "
        "importance_sampling_level)",
    )
    policy_loss: Annotated[str, AfterValidator(POLICY_LOSSES.check_name)] = Field(
        "clip",
        description=f"loss of a token: {', '.join(POLICY_LOSSES.built_in)}, or your own 'file.py:function' (verl "
        "policy_loss.loss_mode, TRL loss_type); clip: PPO's; unclipped: no clip",
    )
    clip: ClipConfig = Field(ClipConfig(), description="bounds of the importance ratio")
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum", "constant", "decoupled"] = Field(
        "sequence_mean",
        description="how token losses are averaged (verl loss_agg_mode); token_mean: DAPO; constant: Dr. GRPO",
    )
    old_logprobs: Literal["recomputed", "engine"] = Field(
        "recomputed", description="recomputed by the trainer, or the engine's, which saves a forward (verl bypass mode)"
    )
    kl: KLConfig = Field(KLConfig(), description="KL divergence from the reference")
    entropy: EntropyConfig = Field(EntropyConfig(), description="entropy bonus and entropy mask")
    rollout_correction: RolloutCorrectionConfig = Field(
        RolloutCorrectionConfig(), description="correction for the difference between engine and policy"
    )
    distillation: DistillationConfig | None = Field(
        None, description="on-policy distillation from a teacher; null: none"
    )
    early_stop: EarlyStopConfig = Field(EarlyStopConfig(), description="when a step's remaining updates are skipped")
    filter: FilterConfig = Field(FilterConfig(), description="which groups and samples a step trains on")
    curriculum: CurriculumConfig = Field(CurriculumConfig(), description="which prompts are skipped")

    @property
    def learns_from_rewards(self) -> bool:
        return not (self.distillation and self.distillation.replaces_rewards)

    @field_validator("preset")
    @classmethod
    def _preset_exists(cls, value: str) -> str:
        if value not in PRESETS:
            raise ValueError(f"unknown preset {value!r}{did_you_mean(value, PRESETS)}; there are: {', '.join(PRESETS)}")
        return value

    @field_validator("rollout_correction", mode="before")
    @classmethod
    def _correction_exists(cls, value: Any) -> Any:
        if isinstance(value, str):
            known = f"{did_you_mean(value, CORRECTIONS)}; there are: {', '.join(CORRECTIONS)}"
            raise ValueError(f"unknown correction {value!r}{known}")
        return value

    @model_validator(mode="after")
    def _parts_agree(self) -> "AlgorithmConfig":
        if found := contradictions(self):
            raise ValueError(found[0])
        return self

    def needs_old_logprobs(self, updates: int) -> bool:
        """Return whether a step computes the policy's logprobs before the first of its `updates`.

        Several updates or a KL in the reward need them, unless `old_logprobs: engine` takes the engine's. The entropy
        mask always needs this forward, because engines return no entropies, and so do covariances and the optimal token
        baseline. Self-distillation compares logprobs of the same weights: staleness and the engine's rounding may
        exceed what the teacher's prompt changes.
        """
        by_distribution = self.entropy.top_quantile < 1 or self.advantage.of_tokens
        if by_distribution or policy_loss_entry(self.policy_loss).covariance:
            return True
        kl_in_reward = self.kl.coef > 0 and self.kl.apply_to == "reward"
        teaches_itself = self.distillation is not None and self.distillation.teaches_itself
        return self.old_logprobs == "recomputed" and (updates > 1 or kl_in_reward or teaches_itself)


def contradictions(algorithm: AlgorithmConfig) -> list[str]:
    """Return an error message for each combination of settings that cannot work, with the nearest choice that does."""
    kl = algorithm.kl
    correction = algorithm.rollout_correction
    policy_loss = policy_loss_entry(algorithm.policy_loss)
    corrects = correction.kind != "none"
    rules = {
        "kl.target and kl.ref_update_every need a reference: set kl.coef above 0": (
            not kl.coef and (kl.target or kl.ref_update_every)
        ),
        "kl.estimator=k1 in the loss has a gradient of mean 0, so it regularizes nothing: set kl.estimator=k3_unbiased "
        "or k2, or kl.apply_to=reward": kl.coef and kl.estimator == "k1" and kl.apply_to == "loss",
        "kl.level=sequence needs kl.apply_to=loss, and with kl.estimator=k3_unbiased ratio=product: a KL in the reward "
        "is always that of the full response": (
            kl.level == "sequence"
            and (kl.apply_to == "reward" or (kl.estimator == "k3_unbiased" and algorithm.ratio != "product"))
        ),
        f"rollout_correction.kind={correction.kind} has no limit: set rollout_correction.high, e.g. 2.0": (
            corrects and correction.low is None and correction.high is None
        ),
        "old_logprobs=engine leaves nothing to correct: set rollout_correction.kind=none or old_logprobs=recomputed": (
            algorithm.old_logprobs == "engine" and corrects
        ),
        f"policy_loss={algorithm.policy_loss} is defined on token ratios: set ratio=token": (
            policy_loss.token_ratios and algorithm.ratio != "token"
        ),
        f"policy_loss={algorithm.policy_loss} applies token corrections itself: set rollout_correction.level=token": (
            policy_loss.applies_correction and corrects and correction.level not in policy_loss.applies_correction
        ),
    }
    found = [sentence for sentence, applies in rules.items() if applies]
    return found + _advantage_contradictions(algorithm) + _token_contradictions(algorithm)


def _advantage_contradictions(algorithm: AlgorithmConfig) -> list[str]:
    advantage = algorithm.advantage
    distillation = algorithm.distillation
    replaces = not algorithm.learns_from_rewards
    kl_in_reward = algorithm.kl.coef > 0 and algorithm.kl.apply_to == "reward"
    special = advantage.estimator or advantage.level == "process" or advantage.combine == "normalize"
    ignores_kl = special or replaces or advantage.of_tokens
    rules = {
        "kl.apply_to=reward needs the built-in advantages of one summed reward a response: set kl.apply_to=loss, or "
        "leave out advantage.estimator, level, combine, baseline=optimal_token and distillation.advantage=replace": (
            kl_in_reward and ignores_kl
        ),
        "advantage.level=process needs advantage.baseline=group_mean and advantage.combine=sum": (
            advantage.level == "process" and (advantage.baseline, advantage.combine) != ("group_mean", "sum")
        ),
        "advantage.combine=normalize normalizes each reward in its group: set advantage.baseline=group_mean and "
        "advantage.scale=group_std": (
            advantage.combine == "normalize"
            and not advantage.of_tokens
            and (advantage.baseline, advantage.scale) != ("group_mean", "group_std")
        ),
        "advantage.baseline=optimal_token belongs to one summed reward a response: leave out advantage.estimator, "
        "level and combine": advantage.of_tokens and special,
        f"advantage.scale={advantage.scale} needs a group baseline: set advantage.scale=none or batch_std": (
            advantage.baseline == "none" and advantage.scale in ("group_std", "group_mean")
        ),
        "gamma and lam belong to a critic's advantages: set algorithm: ppo, or leave them out": (
            not advantage.of_critic and (algorithm.gamma, algorithm.lam) != (1, 1)
        ),
        "advantage.baseline=critic estimates advantages of tokens: leave out advantage.estimator and distillation, and "
        "set advantage.scale=none (whiten=true normalizes)": (
            advantage.of_critic and (advantage.estimator or distillation or advantage.scale != "none")
        ),
        "filter.zero_std looks at groups: set advantage.baseline=group_mean, or filter.zero_std=keep": (
            algorithm.filter.zero_std != "keep" and not advantage.compares_groups
        ),
        "distillation.advantage=replace learns from no reward: set filter.zero_std=keep and advantage.whiten=false, or "
        "distillation.advantage=add": replaces and (algorithm.filter.zero_std != "keep" or advantage.whiten),
    }
    return [sentence for sentence, applies in rules.items() if applies]


def _token_contradictions(algorithm: AlgorithmConfig) -> list[str]:
    """Return a message for each part that differs by token, beside a ratio or loss of a whole sequence."""
    distillation = algorithm.distillation
    policy_loss = policy_loss_entry(algorithm.policy_loss)
    by_token = {
        "advantage.level=process": algorithm.advantage.level == "process",
        "advantage.baseline=critic": algorithm.advantage.of_critic,
        "advantage.baseline=optimal_token": algorithm.advantage.of_tokens,
        "distillation": distillation is not None and distillation.topk is None,
    }
    sentences = []
    for part in (name for name, is_used in by_token.items() if is_used):
        if algorithm.ratio in ("sequence", "product"):
            sentences.append(
                f"{part} differs by token, ratio={algorithm.ratio} does not: set ratio=token or sequence_token"
            )
        if not policy_loss.token_advantages:
            sentences.append(
                f"{part} differs by token, policy_loss={algorithm.policy_loss} averages over them: set "
                "policy_loss=clip or unclipped"
            )
    return sentences
