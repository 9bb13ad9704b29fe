"""Find the settings that differ between a run and an attempt to resume it."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_mp.config import Settings, SftSettings
from grpo_mp.config.settings import default_value
from grpo_mp.utils.redact import without_secrets

# Settings that may change at a resume: length of the run, files it writes, layout and engines, learning rate, time
# limits, evaluation.
CHANGEABLE = re.compile(
    r"run\.(steps|epochs|save_every|eval_every|resume|keep_checkpoints|export\w*)"
    r"|(layout|engine|sync|monitor|sample|data\.eval)\..+|data\.(eval|max_eval_\w+)"
    r"|training\.(max_tokens_per_microbatch|recompute|logprob_chunk_tokens)"
    r"|optimizer\.(lr|min_lr|warmup_updates|lr_schedule|offload|skip_grad_norm)"
    r"|rollout\.dump|reward\.judge\.cache|(\w+\.)+\w+_s"
    r"|training\.megatron_args\.(num_layers_in_\w+|pipeline_model_parallel_layout)"
)
# Paths, which may change freely: the train data is compared by the digest in the checkpoint.
PLACES = re.compile(r"run\.folder|data\.train(\..+\.(path|pass_rates))?")
MODELS = re.compile(r"(model|critic)\.path|reward\.model\.path|algorithm\.distillation\.teacher(\..+)?\.path")


@dataclass(frozen=True)
class Change:
    """A setting that differs between a run and an attempt to resume it."""

    name: str
    before: Any
    now: Any

    @property
    def allowed(self) -> bool:
        return bool(CHANGEABLE.fullmatch(self.name))


def settings_changes(old: Any, new: Any) -> list[Change]:
    """Return the differences between two nested dictionaries of settings; missing settings have default values."""
    old_values = dict(dotted(old))
    new_values = dict(dotted(new))
    root = SftSettings if "sft" in new else Settings
    changes = []
    for name in new_values | old_values:
        before, now = (values.get(name, default_value(name, root)) for values in (old_values, new_values))
        is_moved = MODELS.fullmatch(name) and os.path.realpath(str(before)) == os.path.realpath(str(now))
        if before != now and not is_moved and not PLACES.fullmatch(name):
            changes.append(Change(name, before, now))
    return changes


def describe_changes(old: Any, new: Any) -> list[str]:
    """Return a sentence for each changed setting, with secrets removed."""
    changes = settings_changes(without_secrets(old), without_secrets(new))
    return [f"resume: {change.name} {_shown(change.before)} -> {_shown(change.now)}" for change in changes]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def dotted(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting in nested dictionaries."""
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from dotted(value, f"{name}.{key}".removeprefix("."))
