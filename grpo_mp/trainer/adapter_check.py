"""Compare adapters with those of a checkpoint, and with what peft can load, before anything starts."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.peft_folder import base_of
from grpo_mp.checkpoint.run_state import MANIFEST, complete_checkpoints, read_manifest
from grpo_mp.config import TrainerSettings
from grpo_mp.config.sections import ModelConfig
from grpo_mp.policy.checkpoint import check_same_adapters, read_common
from grpo_mp.trainer.save import POLICY
from grpo_mp.utils.errors import UserError


def check_adapters(settings: TrainerSettings) -> list[str]:
    """Return a warning where peft will not find the base of the adapters that the run exports.

    Raises UserError, on the first rank, where the run's newest whole checkpoint has other adapters, or for other
    weights.
    """
    run, model = settings.run, settings.model
    if model.lora is None:
        return []
    if _is_first_rank() and (saved := _newest_saved(run.folder)):
        check_same_adapters(*saved, model.path, model.lora.description)
    return _peft_warnings(model.path) if run.export or run.export_every else []


def check_checkpoint(checkpoint: Path, model: ModelConfig) -> None:
    """Check a checkpoint that a command names: it is whole, and on the first rank its adapters are those of `model`.

    Raises UserError: no manifest or a damaged one, other adapters, or adapters for other weights than model.path.
    """
    if not (checkpoint / MANIFEST).is_file():
        raise UserError(f"{checkpoint}: incomplete checkpoint, {MANIFEST} is missing: give RUN/checkpoints/step_N")
    read_manifest(checkpoint)
    if not _is_first_rank():
        return
    saved, lora = _saved_policy(checkpoint), model.lora
    model.read_config()  # the folder is there
    check_same_adapters(*saved, model.path if lora else None, lora.description if lora else "")


def _is_first_rank() -> bool:
    """Return whether this process compares weights: that all read samples of them would be slow on many hosts."""
    return os.environ.get("RANK", "0") == "0"


def _newest_saved(run_folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint's folder of the policy and what it says beside tensors.

    Damaged ones are passed over, as by the run that resumes.
    """
    for checkpoint in reversed(complete_checkpoints(run_folder)):
        with suppress(UserError):
            read_manifest(checkpoint)
            return _saved_policy(checkpoint)
    return None


def _saved_policy(checkpoint: Path) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint's folder of the policy and what it says beside tensors. Raises UserError: it is damaged."""
    folder = checkpoint / POLICY
    return folder, read_common(folder)


def _peft_warnings(model: Path) -> list[str]:
    base = base_of(model)
    if (base / "config.json").is_file():
        return []
    return [
        f"model.path={model} is a converted folder of {base}, which is not there: exported adapters name it as their "
        "base, and peft cannot load them: put it back"
    ]
