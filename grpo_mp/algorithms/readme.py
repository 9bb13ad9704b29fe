"""The README of this package, with every preset in it; `python -m grpo_mp.algorithms.readme` writes it anew."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_mp.algorithms.presets import PRESETS

PAGE = Path(__file__).with_name("README.md")

HEAD = """# algorithms

<!-- Written by `python -m grpo_mp.algorithms.readme`; edit readme.py or presets.py, not this file. -->

`algorithm: dapo` in a settings file, or `algorithm=dapo` on the command line, takes a preset; any part can be set over
it: `algorithm: {preset: dapo, clip: {high: 0.3}}`. The run folder's settings.yaml then says every constant. A preset is
a choice of parts in presets.py, never a branch in code: advantage (advantages.py), ratio (losses.py), surrogate
(policy_losses.py), aggregation (aggregation.py), KL (kl.py), correction for the engine (corrections.py), filters
(group_filters.py). Your own loss, advantage or filter stands in a file of yours ([extending](../EXTENDING.md)).

## Which preset when

| preset | take it when |
|---|---|
"""

GROUP_SIZE = """
## Which group size

`rollout.group_size`, G, is how many answers one prompt gets. A group whose answers are all right or all wrong teaches
nothing: of problems that the policy solves with chance p, 1 - p^G - (1-p)^G of the groups teach. A baseline of the
other answers makes an advantage's variance G / (G-1) times that of the reward.

| G | groups that teach at {chances} | variance | take it when |
|---|{lines}|---|---|
"""
CHANCES = (0.01, 0.1, 0.3, 0.5)
GROUP_SIZES = {
    2: "Samples are dear and p is near 0.5: 98 % of what 16 reached, with an eighth of them (2-GRPO, arXiv 2510.00977)",
    4: "A first try, a judge that costs, answers of many thousand tokens",
    8: "The usual start, and TRL's default",
    16: "Long reasoning on problems of mixed difficulty: DAPO and R1",
    32: "Most groups of 16 are all wrong (reward/zero_std_ratio above 0.8 with a low reward)",
    64: "Problems solved once in fifty: DeepSeekMath; pass@64 before training says whether they are solved at all",
}
GROUP_SIZE_END = """
A step has rollout.prompts_per_step x G samples: at the same cost, twice the G is half the prompts. With p near 1 take
harder prompts rather than a larger G. `filter: {no_difference: refill}` replaces groups that teach nothing, and costs
what they cost.
"""

PARTS = """
## Parts

| what | settings | known as |
|---|---|---|
| ratio | `ratio: token`, `sequence`, `sequence_token`, `product` | TRL's importance_sampling_level; or the product |
| old logprobs | `old_logprobs: recomputed` or `engine` | bypass mode: the engine's count, no forward pass |
| std | `advantage: {std: sample}` or `population` | torch's and TRL's n - 1, or numpy's n |
| mismatch, by token | `correction: {kind: truncate, high: 2.0}` | TIS |
| | `correction: {kind: mask, low: 0.5, high: 5.0}` | IcePop, MIS by token |
| mismatch, by sequence | `correction: {kind: mask, level: sequence, high: 3.0}` | MIS, sequence mask |
| stale sequences | `correction: {off_policy_limit: 0.5}` | off-policy sequence masking (DeepSeek-V3.2) |
| stale updates | `drift: {kl: 0.1, effective_samples: 0.5}` | the rest of the step's updates is skipped |
| two-sided clip | `clip: {dual: 3.0}` | dual clip, TRL's delta |
| KL | `kl: {weight: 0.01, estimator: k3, place: loss}` | k1, k2, k3, k3_clamped, k3_unbiased; loss or reward |
| KL of whole answers | `kl: {weight: 0.001, level: sequence}` | R1, eq. 2 |
| KL, only watched | `kl: {watch_share: 0.05}` | train/kl_loss of that share at weight 0; a host copy of the weights |
| adaptive KL | `kl: {target: 0.05}` | adaptive controller |
| moving reference | `kl: {refresh_every: 100, refresh_mix: 0.6}` | TRL's sync_ref_model |
| entropy | `entropy: {weight: 0.001}`, `{target: 0.2}`, `{top_quantile: 0.2}` | bonus, adaptive bonus, 80/20 mask |
| several rewards | `advantage: {combine: normalise}` | GDPO |
| dynamic sampling | `filter: {no_difference: refill, metric: accuracy}` | DAPO; or `drop`, or by the whole reward |
| truncated samples | `filter: {truncated: mask}` | overlong filtering |
| learnt prompts | `filter: {rest_after: 3, rest_steps: 50}` | graduation |
| over-sampling | `filter: {oversample: 1.5, admit: launch}` | admit finish prefers short answers: rollout/length_bias |

Beside `algorithm`: `optimizer.updates_per_step` divides a step's samples into mini-batches (`optimizer.shuffle` at
random), `optimizer.epochs` passes over them again: mu of GRPO's algorithm 1, TRL's num_iterations. With one update in
all every ratio is 1, and what acts on ratios does nothing; a start says so.

Denominators are those of the whole update, whatever the layout and micro-batch size: `bnpo`, which in TRL divides by
the tokens of one micro-batch, divides by those of the update here. `sequence` and `product` have the sequence's value
at each of its tokens and the sequence's gradient; `sequence_token` has the token's (GSPO, eq. 14), which for one
advantage per sequence and equal weights is the same. R1's equations 1 and 2 are written with ratio and KL of whole
answers: `ratio: product` and `kl: {level: sequence}` take them so, the presets r1 and r1_zero take DeepSeekMath's by
token. A token whose engine logprob is not finite does not learn, and is counted.

## Words that you may look for

| word | here |
|---|---|
| dynamic clipping | DeepSeekMath has none; nearest: gmpo, bounding a sequence's mean, and sapo, without an edge |
| length-normalised reward | DeepSeekMath has none; it divides losses by length (`aggregation: sequence_mean`) |
| GRPO++ | grpo_pp, as DeepSWE names it; essays of that name list other tricks, most of them parts above |

## Presets
"""

CURVES = """
## Curves

`python -m tests.bench.learning_curves` trains the quickstart's policy by several presets and seeds, four updates a step
(with one, presets that differ in their ratio alone are one algorithm), prints accuracy, reward, lengths, KL and entropy
of every seed, and draws their means.
"""


def markdown() -> str:
    """Return the README as Markdown."""
    use_rows = "".join(f"| `{name}` | {preset.use} |\n" for name, preset in PRESETS.items())
    preset_rows = "".join(
        f"| `{name}` | {preset.source} | {', '.join(_constants(preset.settings)) or 'the defaults'} |\n"
        for name, preset in PRESETS.items()
    )
    preset_head = "\n| preset | source | constants that differ from the defaults |\n|---|---|---|\n"
    return f"{HEAD}{use_rows}{_group_sizes()}{PARTS}{preset_head}{preset_rows}{CURVES}"


def _group_sizes() -> str:
    """Return the section on group sizes with its computed shares."""
    head = GROUP_SIZE.format(chances=" | ".join(f"p = {p:g}" for p in CHANCES), lines="|".join("---" for _ in CHANCES))
    rows = ""
    for size, use in GROUP_SIZES.items():
        shares = " | ".join(f"{1 - p**size - (1 - p) ** size:.0%}" for p in CHANCES)
        rows += f"| {size} | {shares} | {size / (size - 1):.2f} | {use}. |\n"
    return f"{head}{rows}{GROUP_SIZE_END}"


def _constants(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `section.key=value` for every leaf of the tree."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from _constants(value, name)
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            yield f"`{name.removeprefix('algorithm.')}={shown}`"


if __name__ == "__main__":
    PAGE.write_text(markdown())
