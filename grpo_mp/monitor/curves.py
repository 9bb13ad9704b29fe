"""Which metrics belong on one chart: of the report, and of TensorBoard's custom scalars. Data only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_mp.utils.phases import GIB


@dataclass(frozen=True)
class Curve:
    """A chart to be made: the metrics whose names match `patterns`, by label; `band`: name of a half width.

    A label of "" is the last part of the metric's name. `stacked`: areas on top of each other.
    """

    title: str
    unit: str
    patterns: Mapping[str, str]
    note: str = ""
    band: str = ""
    stacked: bool = False
    scale: float = 1.0


PHASES = ("generate", "score", "logprob", "train", "sync", "check", "save", "eval")  # in the order of their colours


def _phases(pattern: str, phases: Sequence[str] = PHASES) -> dict[str, str]:
    return {phase: pattern.format(phase) for phase in phases}


CURVES: dict[str, tuple[Curve, ...]] = {
    "reward": (
        Curve(
            "Reward",
            "reward",
            patterns={"mean": "reward/mean"},
            note="Band: mean standard deviation in a group.",
            band="reward/group_std",
        ),
        Curve("Reward terms", "reward", {"": "reward/term/*"}, "One that rises while the answer falls is hacked."),
        Curve("Accuracy of the rollouts", "share", {"accuracy": "rollout/accuracy"}),
        Curve("Groups without signal", "share", {"zero std": "reward/zero_std_ratio"}, "All samples score alike."),
        Curve("Solved and hopeless groups", "groups", {"all right": "rollout/solve_all", "none": "rollout/solve_none"}),
        Curve("Skipped prompts", "prompts", {"skipped": "rollout/skipped_prompts"}, "Always answered right."),
    ),
    "lengths": (
        Curve(
            "Response length",
            "tokens",
            {
                "all": "rollout/response_length/mean",
                "right": "rollout/response_length/correct",
                "wrong": "rollout/response_length/incorrect",
            },
            "Wrong answers that grow apart are the length bias that Dr. GRPO names.",
        ),
        Curve(
            "Shortest, longest", "tokens", {"min": "rollout/response_length/min", "max": "rollout/response_length/max"}
        ),
        Curve("Samples to learn from", "tokens", {"mean": "sft/length/mean", "max": "sft/length/max"}),
        Curve("Truncated", "share", {"truncated": "rollout/truncated_ratio"}, "Cut at rollout.max_response_tokens."),
    ),
    "policy": (
        Curve(
            "Supervised loss", "nats", {"train": "sft/loss", "held out": "eval/*/loss"}, "Mean over the learned tokens."
        ),
        Curve("Entropy", "nats", {"entropy": "train/entropy"}),
        Curve("KL to the reference", "nats", {"KL": "train/kl_loss"}),
        Curve(
            "Reverse KL to the teacher",
            "nats",
            {"mean": "distill/reverse_kl/mean"},
            "Per token that the policy wrote (algorithm.distillation).",
        ),
        Curve(
            "Divergence from the teacher's top k",
            "nats",
            {"mean": "distill/kl/mean"},
            "With algorithm.distillation.topk.",
        ),
        Curve("Loss of the critic", "reward^2", {"value": "critic/value_loss"}, "With algorithm: ppo."),
        Curve(
            "What the critic explains",
            "share",
            {"explained variance": "critic/explained_variance", "clipped values": "critic/vf_clipfrac"},
            "Of the returns: 0 is no better than their mean.",
        ),
        Curve("KL of a step's updates", "nats", {"KL": "train/ppo_kl"}),
        Curve("Ratio", "ratio", {"mean": "train/ratio/mean", "max": "train/ratio/max"}),
        Curve("Clipped tokens", "share", {"low": "train/pg_clipfrac_low", "high": "train/pg_clipfrac_high"}),
        Curve("Effective sample size", "share", {"ESS": "train/ess"}, "Of the ratios."),
        Curve(
            "Drafts of one token that are accepted",
            "share",
            {"multi-token-prediction layer": "train/mtp_acceptance"},
            "By speculative decoding, where the layer learns (model.mtp_loss_scaling_factor).",
        ),
        Curve("Loss", "loss", {"loss": "train/loss"}),
        Curve("Gradient norm", "norm", {"norm": "train/grad_norm"}),
        Curve("Updates left out", "updates", {"policy": "train/skipped_updates", "critic": "critic/skipped_updates"}),
        Curve("Learning rate", "rate", {"rate": "train/lr"}),
        Curve("Engine against policy", "nats", {"mean": "mismatch/logprob_abs_diff/mean"}, "Difference of logprobs."),
        Curve("KL of engine to policy", "nats", {"KL": "mismatch/kl"}),
        Curve(
            "Probabilities of engine and policy",
            "factor",
            {"factor": "mismatch/token_mult_prob_error"},
            "By which they differ; 1 is none.",
        ),
        Curve(
            "Engine against policy after a sync",
            "nats",
            {"mean": "sync/check/logprob_abs_diff/mean"},
            "On fixed prompts, with the same weights.",
        ),
        Curve(
            "Weight version lag",
            "updates",
            {"mean": "rollout/weight_version_lag/mean", "max": "rollout/weight_version_lag/max"},
        ),
        Curve("Busiest expert over the mean", "ratio", {"busiest": "train/expert_load/max_over_mean"}),
        Curve(
            "Experts that would differ",
            "share",
            {"first update": "mismatch/router_diff_ratio", "all updates": "train/router_diff_ratio"},
        ),
    ),
    "time": (
        Curve("Phases of a step", "s", _phases("time/{}_s", PHASES[:6]), "Slowest rank.", stacked=True),
        Curve("Idle and overhead", "share", {"idle": "time/idle_share", "overhead": "time/overhead_share"}),
        Curve(
            "Uneven generation",
            "share",
            {"tail": "time/generate_tail_share", "slowest engine": "speed/slowest_engine_ratio"},
            "Tail: after nine groups in ten. Slowest engine: tokens/s over those of the median one.",
        ),
        Curve("Speed", "tokens/s", {"generate": "speed/generate_tokens_per_s", "train": "speed/train_tokens_per_s"}),
    ),
    "memory": (
        Curve("Device memory, peak", "GiB", _phases("memory/{}/peak_device_bytes"), "Largest rank.", scale=1 / GIB),
        Curve(
            "Host memory",
            "GiB",
            _phases("memory/{}/host_bytes"),
            "Largest rank; rising steps are a leak.",
            scale=1 / GIB,
        ),
    ),
}


SOLVE_RATES = {  # of a group, ascending, and their metrics
    "none": "rollout/solve_rate/none",
    "up to 1/4": "rollout/solve_rate/to_25",
    "up to 1/2": "rollout/solve_rate/to_50",
    "up to 3/4": "rollout/solve_rate/to_75",
    "more": "rollout/solve_rate/to_99",
    "all": "rollout/solve_rate/all",
}
# What the report draws otherwise: with standard errors of the scores' files, and as a map.
OF_TENSORBOARD: dict[str, tuple[Curve, ...]] = {
    "scores": (
        Curve("Accuracy on eval sets", "share", {"": "eval/*/accuracy"}),
        Curve("pass@k on eval sets", "share", {"": "eval/*/pass_at_*"}),
        Curve("maj@k on eval sets", "share", {"": "eval/*/maj_at_*"}),
        Curve("Reward on eval sets", "reward", {"": "eval/*/reward"}),
        Curve("Response length on eval sets", "tokens", {"": "eval/*/length"}),
    ),
    "reward": (Curve("Groups by solve rate", "share", SOLVE_RATES),),
}


def tensorboard_layout() -> dict[str, dict[str, tuple[str, list[str]]]]:
    """Return the charts by section for TensorBoard's custom scalars: kind, and regular expressions of names."""
    names = dict.fromkeys((*OF_TENSORBOARD, *CURVES))
    sections = {name: (*CURVES.get(name, ()), *OF_TENSORBOARD.get(name, ())) for name in names}
    return {
        section: {
            curve.title: ("Multiline", [f"^{pattern.replace('*', '[^/]+')}$" for pattern in curve.patterns.values()])
            for curve in curves
        }
        for section, curves in sections.items()
    }
