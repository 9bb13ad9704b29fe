"""The `algorithm` section: independent parts, each with its choices. A preset (presets.py) sets any of them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.algorithms.registries import ADVANTAGE_ESTIMATORS, GROUP_FILTERS, POLICY_LOSSES, policy_loss_entry
from grpo_mp.errors import nearest
from grpo_mp.section import Section


class Advantage(Section):
    estimator: Annotated[str, AfterValidator(ADVANTAGE_ESTIMATORS.check_name)] | None = Field(
        None, description="your own: 'module:function' or 'file.py:function'; null: by level and combine"
    )
    args: dict[str, Any] = Field({}, description="of your own estimator, by name")
    level: Literal["outcome", "process"] = Field("outcome", description="process: rewards per step (reward.steps)")
    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    combine: Literal["sum", "normalise"] = Field("sum", description="normalise: each reward in its group, then summed")
    std: Literal["sample", "population"] = Field("sample", description="over n - 1, as torch and TRL, or over n")
    whiten: bool = Field(False, description="over all response tokens of the step, after all else")
    eps: float = Field(1e-4, gt=0)

    @property
    def built_in(self) -> str:
        """Return the name of the built-in estimator that level and combine choose."""
        if self.level == "process":
            return "process"
        return "decoupled" if self.combine == "normalise" else "outcome"


class Clip(Section):
    low: float = Field(0.2, gt=0, description="ratios below 1 - low are clipped; 1 or more: none")
    high: float = Field(0.2, gt=0, description="ratios above 1 + high are clipped")
    dual: float | None = Field(None, gt=1, description="the largest ratio where the advantage is negative")


class Gate(Section):
    """SAPO's temperatures."""

    positive: float = Field(1.0, gt=0)
    negative: float = Field(1.05, gt=0)


class Gamma(Section):
    """VESPO's weighting w^k e^(lambda (1 - w)), by the sign of the advantage."""

    k_positive: float = Field(2.0, gt=0)
    lambda_positive: float = Field(3.0, gt=0)
    k_negative: float = Field(3.0, gt=0)
    lambda_negative: float = Field(2.0, gt=0)


class KL(Section):
    weight: float = Field(0.0, ge=0, description="0: no reference is loaded, but for watch_share")
    watch_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="of the micro-batches of a step whose KL to the reference is measured at weight 0, at least one; "
        "costs a copy of the weights in host memory, that share of a forward, and two exchanges of the weights with "
        "the copy for each update with such a micro-batch",
    )
    estimator: Literal["k1", "k2", "k3", "k3_clamped", "k3_unbiased"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    level: Literal["token", "sequence"] = Field("token", description="of log r: each token's, or the whole answer's")
    target: float | None = Field(None, gt=0, description="nats per token that the adaptive weight aims at")
    refresh_every: int = Field(0, ge=0, description="steps after which the reference follows the policy; 0: never")
    refresh_mix: float = Field(0.6, gt=0, le=1, description="share of the policy in the refreshed reference")

    @property
    def measured_share(self) -> float:
        """Return the share of micro-batches whose KL to the reference is measured; 0: there is no reference."""
        return 1.0 if self.weight else self.watch_share


class Entropy(Section):
    weight: float = Field(0.0, ge=0, description="of the bonus")
    target: float | None = Field(None, gt=0, description="nats; the weight rises by `step` below it and falls above")
    step: float = Field(0.005, gt=0)
    largest: float = Field(1.0, gt=0)
    top_quantile: float = Field(1.0, gt=0, le=1, description="share of tokens, of the highest entropy, that learn")


class Correction(Section):
    """Importance weights w = old / rollout, for the difference between engine and policy."""

    kind: Literal["none", "truncate", "mask"] = "none"
    level: Literal["token", "sequence"] = "token"
    low: float | None = Field(None, ge=0)
    high: float | None = Field(None, gt=0)
    off_policy_limit: float | None = Field(
        None, gt=0, description="nats per token: sequences with negative advantage beyond it do not learn"
    )


class Drift(Section):
    """Limits beyond which the remaining updates of a step are skipped."""

    kl: float | None = Field(None, gt=0, description="nats per token between old policy and policy")
    effective_samples: float | None = Field(None, gt=0, lt=1, description="share of tokens, by ratio weights")


class Filter(Section):
    no_difference: Literal["keep", "drop", "refill"] = Field("keep", description="groups whose samples are all equal")
    metric: Annotated[str, AfterValidator(GROUP_FILTERS.check_name)] = Field(
        "reward",
        description="what must differ in a group: the whole reward, or with accuracy whether samples are right (DAPO); "
        "or your own 'file.py:function', which says whether to keep it",
    )
    args: dict[str, Any] = Field({}, description="of your own metric, by name")
    most_tries: int = Field(10, ge=1, description="rounds of generation until a refilled step must be full")
    truncated: Literal["keep", "mask"] = Field("keep", description="mask: truncated samples do not learn")
    rest_after: int = Field(0, ge=0, description="times in a row all right until a prompt rests; 0: never")
    rest_steps: int = Field(50, ge=1)
    oversample: float = Field(1.0, ge=1, description="groups launched for each that is needed")
    admit: Literal["launch", "finish"] = Field("launch", description="which of them are taken first")


class Algorithm(Section):
    preset: str = "grpo"
    advantage: Advantage = Advantage()
    ratio: Literal["token", "sequence", "sequence_token", "product"] = Field(
        "token", description="importance ratio of a token, a sequence (geometric mean), GSPO-token, the whole product"
    )
    surrogate: Annotated[str, AfterValidator(POLICY_LOSSES.check_name)] = Field(
        "clip", description=f"{', '.join(POLICY_LOSSES.built_in)}, 'module:function' or 'file.py:function'"
    )
    policy_loss_args: dict[str, Any] = Field({}, description="of your own policy loss, by name")
    clip: Clip = Clip()
    gate: Gate = Gate()
    gamma: Gamma = Gamma()
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum", "constant", "decoupled"] = "sequence_mean"
    control_weight: float = Field(1e-3, gt=0, description="of the first token in the decoupled aggregation")
    old_logprobs: Literal["recomputed", "engine"] = "recomputed"
    kl: KL = KL()
    entropy: Entropy = Entropy()
    correction: Correction = Correction()
    drift: Drift = Drift()
    filter: Filter = Filter()

    @field_validator("preset")
    @classmethod
    def _preset_exists(cls, value: str) -> str:
        if value not in PRESETS:
            raise ValueError(f"unknown preset {value!r}{nearest(value, PRESETS)}; there are: {', '.join(PRESETS)}")
        return value

    @model_validator(mode="after")
    def _parts_agree(self) -> "Algorithm":
        for contradiction in contradictions(self):
            raise ValueError(contradiction)
        return self


def needs_old_logprobs(algorithm: Algorithm, updates: int) -> bool:
    """Say whether a step computes the policy's logprobs before the first of its `updates`.

    With one update they are those of the update itself; with `old_logprobs: engine` the engine has returned them. The
    entropy mask needs entropies, which no engine returns.
    """
    if algorithm.entropy.top_quantile < 1:
        return True
    kl_in_reward = algorithm.kl.weight > 0 and algorithm.kl.place == "reward"
    return algorithm.old_logprobs == "recomputed" and (updates > 1 or kl_in_reward)


def contradictions(algorithm: Algorithm) -> Iterator[str]:
    """Yield a sentence for each combination of settings that cannot work, with the nearest choice that does."""
    kl, correction = algorithm.kl, algorithm.correction
    if kl.weight == 0 and (kl.target or kl.refresh_every):
        yield "kl.target and kl.refresh_every need a reference: set kl.weight above 0"
    if correction.kind != "none" and correction.low is None and correction.high is None:
        yield f"correction.kind={correction.kind} has no limit: set correction.high, e.g. 2.0"
    if correction.kind == "none" and (correction.low is not None or correction.high is not None):
        yield "correction.low and correction.high do nothing with correction.kind=none: set it to truncate or mask"
    if algorithm.old_logprobs == "engine" and correction.kind != "none":
        yield "old_logprobs=engine leaves nothing to correct: set correction.kind=none or old_logprobs=recomputed"
    policy_loss = policy_loss_entry(algorithm.surrogate)
    if policy_loss.token_ratios and algorithm.ratio != "token":
        yield f"surrogate={algorithm.surrogate} is defined on token ratios: set ratio=token"
    if policy_loss.applies_correction and correction.kind != "none" and correction.level == "sequence":
        yield f"surrogate={algorithm.surrogate} multiplies token corrections itself: set correction.level=token"
    if kl.level == "sequence" and kl.estimator == "k3_unbiased" and algorithm.ratio != "product":
        yield "kl.level=sequence with kl.estimator=k3_unbiased needs the ratio of whole answers: set ratio=product"
    if kl.level == "sequence" and kl.place == "reward":
        yield "kl.level=sequence is for the loss; a reward takes the KL of the whole answer anyway: set kl.place=loss"
    yield from _advantage_contradictions(algorithm)


def _advantage_contradictions(algorithm: Algorithm) -> Iterator[str]:
    advantage = algorithm.advantage
    if advantage.estimator in ADVANTAGE_ESTIMATORS.built_in and advantage.estimator != advantage.built_in:
        yield f"advantage.estimator={advantage.estimator}: level and combine choose {advantage.built_in}: leave it out"
    if advantage.estimator and algorithm.kl.place == "reward" and algorithm.kl.weight:
        yield "advantage.estimator knows no KL among its rewards: set kl.place=loss"
    if advantage.level == "process" and algorithm.ratio in ("sequence", "product"):
        yield f"advantage.level=process differs by token, ratio={algorithm.ratio} does not: set ratio=sequence_token"
    if advantage.level == "process" and (advantage.baseline, advantage.combine) != ("group_mean", "sum"):
        yield "advantage.level=process needs advantage.baseline=group_mean and advantage.combine=sum"
    if advantage.level == "process" and algorithm.kl.place == "reward" and algorithm.kl.weight:
        yield "advantage.level=process has no reward of the whole response for the KL: set kl.place=loss"
    if advantage.combine == "normalise" and algorithm.kl.place == "reward" and algorithm.kl.weight:
        yield "advantage.combine=normalise knows no KL among its rewards: set kl.place=loss"
    if advantage.combine == "normalise" and advantage.baseline == "none":
        yield "advantage.combine=normalise works inside groups: set advantage.baseline=group_mean"
    if advantage.baseline == "none" and advantage.scale == "group_std":
        yield "advantage.scale=group_std needs a group baseline: set advantage.scale=none or batch_std"
    if algorithm.filter.no_difference != "keep" and advantage.baseline == "none":
        yield "filter.no_difference looks at groups: set advantage.baseline=group_mean, or filter.no_difference=keep"
