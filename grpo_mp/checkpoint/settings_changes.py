"""Find the settings that differ between a run and an attempt to resume it.

Two model paths count as equal if the contents of the models are equal. RUN/inputs.json has the digests of the models,
and the date that chat templates insert into prompts.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from grpo_mp.config import Settings, SftSettings
from grpo_mp.config.settings import default_value
from grpo_mp.data.template import set_template_date, template_date
from grpo_mp.models.folder_digest import model_digest
from grpo_mp.utils.files import write_json
from grpo_mp.utils.reading import parse_yaml, read_json
from grpo_mp.utils.redact import without_secrets

INPUTS = "inputs.json"
# Settings that may change at a resume: length of the run, files it writes, layout and engines, learning rate, time
# limits, evaluation.
CHANGEABLE = re.compile(
    r"run\.(steps|epochs|save_every|eval_every|resume|keep_checkpoints|export\w*)"
    r"|(layout|engine|sync|monitor|sample|data\.eval)\..+|data\.(eval|max_eval_\w+)"
    r"|training\.(max_tokens_per_microbatch|recompute|logprob_chunk_tokens)"
    r"|optimizer\.(lr|min_lr|warmup_updates|lr_schedule|offload|skip_grad_norm)"
    r"|rollout\.dump|reward\.judge\.cache|sft\.epochs|(\w+\.)+\w+_s"
    r"|training\.megatron_args\.(num_layers_in_\w+|pipeline_model_parallel_layout)"
)
# Paths, which may change freely: the train data is compared by the digest in the checkpoint.
PLACES = re.compile(r"run\.folder|data\.train(\..+\.(path|pass_rates))?")
MODELS = re.compile(r"(model|critic)\.path|(reward|algorithm)(\.\w+)*\.folder")


@dataclass(frozen=True)
class Change:
    """A setting that differs between a run and an attempt to resume it."""

    name: str
    before: Any
    now: Any

    @property
    def allowed(self) -> bool:
        return bool(CHANGEABLE.fullmatch(self.name))


def settings_changes(old: Any, new: Any, run_folder: Path) -> list[Change]:
    """Return the differences between two nested dictionaries of settings; missing settings have default values."""
    digests = _read_inputs(run_folder).get("models", {})
    old_values, new_values = dict(_dotted(old)), dict(_dotted(new))
    root, changes = SftSettings if "sft" in new else Settings, []
    for name in new_values | old_values:
        change = Change(name, *(values.get(name, default_value(name, root)) for values in (old_values, new_values)))
        if change.before == change.now or PLACES.fullmatch(name):
            continue
        if not (MODELS.fullmatch(name) and _is_same_model(change, digests)):
            changes.append(change)
    return changes


def describe_changes(old: Any, new: Any, run_folder: Path) -> list[str]:
    """Return a sentence for each changed setting, with secrets removed."""
    changes = settings_changes(without_secrets(old), without_secrets(new), run_folder)
    return [f"resume: {change.name} {_shown(change.before)} -> {_shown(change.now)}" for change in changes]


def use_template_date(run_folder: Path) -> None:
    """Set the date that chat templates insert to the date recorded in the run folder, if any."""
    if day := _read_inputs(run_folder).get("date"):
        set_template_date(date.fromisoformat(day))


def write_inputs(run_folder: Path, resolved: str) -> None:
    """Write inputs.json: the date of the run, and digests of the models in its settings. Recorded values are kept."""
    before = _read_inputs(run_folder)
    digests = before.get("models", {})
    paths = {value for name, value in _dotted(parse_yaml(resolved, "settings")) if value and MODELS.fullmatch(name)}
    models = {path: digests.get(path) or _digest_of_model(path) for path in sorted(paths)}
    now = {"date": before.get("date", template_date().isoformat()), "models": models}
    if now != before:
        write_json(run_folder / INPUTS, now)


def _read_inputs(run_folder: Path) -> Mapping[str, Any]:
    content = read_json(run_folder / INPUTS) if (run_folder / INPUTS).exists() else {}
    return content if isinstance(content, dict) else {}


def _is_same_model(change: Change, digests: Mapping[str, str]) -> bool:
    before, now = change.before, change.now
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    return os.path.realpath(before) == os.path.realpath(now) or bool(
        digests.get(before) and digests[before] == _digest_of_model(now)
    )


def _digest_of_model(path: str) -> str:
    try:
        return model_digest(Path(path))
    except OSError:
        return ""


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _dotted(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _dotted(value, f"{name}.{key}".removeprefix("."))
