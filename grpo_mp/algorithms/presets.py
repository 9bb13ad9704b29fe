"""Published algorithms by name, with settings and sources. Data only: no code branches on a preset."""

from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]

GROUP_MEAN_ONLY: Tree = {"baseline": "group_mean", "scale": "none"}
CLIP_HIGHER: Tree = {"low": 0.2, "high": 0.28}
SEQUENCE_CLIP: Tree = {"low": 3e-4, "high": 4e-4}


@dataclass(frozen=True)
class Preset:
    """A published algorithm. `settings`: defaults, which the user's own settings override section by section."""

    source: str
    use: str  # when to choose it
    settings: Tree


def _algorithm(source: str, use: str, **algorithm: Any) -> Preset:
    return Preset(source, use, {"algorithm": algorithm})


def _r1(stage: str, algorithm: Tree) -> Preset:
    """Make a preset of R1: the reference is updated every 400 updates, which are 25 steps of 16 updates."""
    return Preset(
        f"DeepSeek-R1, Nature 645 (2025) and arXiv 2501.12948, {stage}",
        "You reproduce it, or train a policy of its size.",
        {
            "algorithm": {"kl": {"coef": 0.001, "ref_update_every": 25, "ref_update_mix": 1.0}} | algorithm,
            "rollout": {"prompts_per_step": 512, "group_size": 16},
            "optimizer": {"lr": 3e-6},
            "training": {"updates_per_step": 16, "shuffle": True},
        },
    )


PRESETS: dict[str, Preset] = {
    "grpo": _algorithm(
        "DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; clip, std and its epsilon as in TRL; the KL weight (paper: 0.04) "
        "is left to you, its estimator is the paper's k3 (TRL 1.16: k3_unbiased)",
        "The original. A start for any verifiable task with short answers.",
    ),
    "grpo_process": _algorithm(
        "DeepSeekMath, arXiv 2402.03300, section 4.1.3",
        "You can judge single steps of an answer (reward.steps).",
        advantage={"level": "process"},
    ),
    "dr_grpo": _algorithm(
        "Liu et al., Understanding R1-Zero-like training, arXiv 2503.20783, section 3.2",
        "Wrong answers grow long under grpo; questions differ much in difficulty.",
        advantage=GROUP_MEAN_ONLY,
        aggregation="constant",
    ),
    "dapo": Preset(
        "DAPO, arXiv 2503.14476, eq. 8 to 13; groups kept by accuracy, an overlong penalty of half the reward's range",
        "Long chains of thought on hard questions; entropy falls too fast under grpo.",
        {
            "algorithm": {
                "clip": CLIP_HIGHER,
                "aggregation": "token_mean",
                "filter": {"zero_std": "refill", "metric": "accuracy"},
            },
            "reward": {"overlong": {"weight": 1.0}},
        },
    ),
    "degrpo": _algorithm(
        "Thinkless, arXiv 2505.13379, eq. 5 (decoupled GRPO); no std, KL 0.001 as in its published script, whose "
        "rewards are 1 (short, right), 0.5 (thinking, right) and -1 (wrong)",
        "The first token chooses a mode, such as thinking or a short answer, and must not be outweighed by the rest.",
        advantage=GROUP_MEAN_ONLY,
        aggregation="decoupled",
        kl={"coef": 0.001, "estimator": "k3_clamped"},
    ),
    "gspo": _algorithm(
        "GSPO, arXiv 2507.18071, eq. 5 to 7, clip of section 5.1",
        "Mixture of experts with several updates per step: routing changes make token ratios noisy.",
        ratio="sequence",
        clip=SEQUENCE_CLIP,
    ),
    "gspo_token": _algorithm(
        "GSPO, arXiv 2507.18071, eq. 13 and 14",
        "As gspo, with advantages that differ by token.",
        ratio="sequence_token",
        clip=SEQUENCE_CLIP,
    ),
    "cispo": _algorithm(
        "MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; upper bound 5 as in ScaleRL, arXiv 2510.13786",
        "Rare but decisive tokens are clipped away under grpo; many updates per step.",
        policy_loss="cispo",
        clip={"low": 1.0, "high": 4.0},
        aggregation="token_mean",
    ),
    "gmpo": _algorithm(
        "GMPO, arXiv 2507.20673, eq. 4: token clip (e^-0.4, e^0.4)",
        "Outlier ratios make grpo unstable.",
        policy_loss="gmpo",
        clip={"low": 0.3296799539643607, "high": 0.4918246976412703},
    ),
    "sapo": _algorithm(
        "SAPO, arXiv 2511.20347: sigmoid gates, temperatures 1.0 and 1.05",
        "You want a smooth trust region instead of a clip.",
        policy_loss="sapo",
    ),
    "luspo": _algorithm(
        "LUSPO, arXiv 2602.05261: GSPO with the sequence loss multiplied by its length; clip of section 5.1",
        "Answers shrink under gspo.",
        ratio="sequence",
        clip={"low": 2e-3, "high": 2.5e-3},
        aggregation="sequence_sum",
    ),
    "vespo": _algorithm(
        "VESPO, arXiv 2602.10693: gamma weighting of sequence ratios, k 2 and 3, lambda 3 and 2",
        "Stale samples: asynchronous generation, or many updates per step.",
        policy_loss="vespo",
        aggregation="token_mean",
    ),
    "bnpo": _algorithm(
        "TRL's loss_type bnpo: all tokens of the update count alike, symmetric clip",
        "grpo without its preference for short right answers, and nothing else changed.",
        aggregation="token_mean",
    ),
    "rloo": _algorithm(
        "Ahmadian et al., Back to basics, arXiv 2402.14740, eq. 8; as in TRL the ratio of full answers, clipped at "
        "0.2, and KL in the reward, weight 0.05",
        "Small groups; few updates per step; a reward model.",
        advantage={"baseline": "leave_one_out", "scale": "none"},
        ratio="product",
        clip={"low": 0.2, "high": 0.2},
        kl={"coef": 0.05, "estimator": "k1", "apply_to": "reward"},
    ),
    "ppo": Preset(
        "PPO, arXiv 1707.06347, with a critic: GAE, arXiv 1506.02438, eq. 16; gamma 1, clipped values, "
        "whitened advantages and a KL per token in the reward, weight 0.05, as TRL's PPO had them; lambda 1 for long "
        "answers (VC-PPO, arXiv 2503.01491; TRL had 0.95)",
        "Rewards of one answer per prompt; credit that differs by token; to compare with what GRPO leaves out.",
        {
            "algorithm": {
                "advantage": {"baseline": "critic", "scale": "none", "whiten": True},
                "aggregation": "token_mean",
                "kl": {"coef": 0.05, "estimator": "k1", "apply_to": "reward"},
            },
            "critic": {},
        },
    ),
    "reinforce_pp": _algorithm(
        "REINFORCE++, arXiv 2501.03262: KL in the reward, returns to go, whitened over the batch",
        "One answer per prompt; general reward models.",
        advantage={"baseline": "none", "scale": "none", "whiten": True},
        aggregation="token_mean",
        kl={"coef": 0.01, "estimator": "k1", "apply_to": "reward"},
    ),
    "reinforce_pp_baseline": _algorithm(
        "REINFORCE++-baseline, arXiv 2501.03262: group mean, whitened over the batch, k2 in the loss; KL weight of "
        "OpenRLHF's script",
        "Groups with sparse rewards; std inside groups is too noisy.",
        advantage={"baseline": "group_mean", "scale": "none", "whiten": True},
        aggregation="token_mean",
        kl={"coef": 1e-5, "estimator": "k2"},
    ),
    "grpo_pp": _algorithm(
        "GRPO++ as the authors of DeepSWE (Agentica, Together AI, 2025) list it: clip higher, no KL (DAPO), no std and "
        "no division by length (Dr. GRPO), leave-one-out (RLOO), truncated samples masked, no entropy bonus",
        "Long agentic or reasoning answers that are often cut.",
        advantage={"baseline": "leave_one_out", "scale": "none"},
        clip=CLIP_HIGHER,
        aggregation="constant",
        filter={"truncated": "mask"},
    ),
    "r1_zero": _r1("R1-Zero: 512 prompts x 16, split at random into 16 updates, KL 0.001, lr 3e-6; names no clip", {}),
    "r1": _r1("first stage of RL of R1: as R1-Zero, with a clip of 10", {"clip": {"low": 10.0, "high": 10.0}}),
}


def with_preset(tree: Tree) -> Tree:
    """Merge the user's settings over the preset that they name; `algorithm: dapo` names a preset, too."""
    algorithm = tree.get("algorithm", {})
    if isinstance(algorithm, str):
        algorithm = {"preset": algorithm}
    preset = PRESETS.get(str(algorithm.get("preset", "grpo"))) if isinstance(algorithm, dict) else None
    return _merge(preset.settings if preset else {}, tree | {"algorithm": algorithm})


def _merge(defaults: Tree, overrides: Tree) -> Tree:
    """Merge two trees of settings, recursively for sections in both."""
    sections = {
        key: _merge(defaults[key], overrides[key])
        for key in defaults.keys() & overrides.keys()
        if isinstance(defaults[key], dict) and isinstance(overrides[key], dict)
    }
    return defaults | overrides | sections
