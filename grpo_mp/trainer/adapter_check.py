"""Compare adapters with those that a run resumes from, and with what peft can load, before anything starts."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.peft_folder import base_of
from grpo_mp.checkpoint.run_state import checkpoint_checksums, complete_checkpoints, read_manifest
from grpo_mp.checkpoint.torch_dist import COMMON
from grpo_mp.config import TrainerSettings
from grpo_mp.errors import UserError
from grpo_mp.policy.checkpoint import check_same_adapters, read_common
from grpo_mp.trainer.save import POLICY


def check_adapters(settings: TrainerSettings) -> list[str]:
    """Return a warning where peft will not find the base of the adapters that the run exports.

    Raises UserError, on the first rank, where the run's newest whole checkpoint has other adapters, or for other
    weights. It reads samples of model.path, see `base_digest`; nothing without adapters.
    """
    run, model = settings.run, settings.model
    if model.lora is None:
        return []
    is_first = os.environ.get("RANK", "0") == "0"  # that all read the samples would be slow on many hosts
    if is_first and (saved := _newest_saved(run.folder)):
        check_same_adapters(*saved, model.path, model.lora.description)
    return _peft_warnings(model.path) if run.export or run.export_every else []


def _newest_saved(run_folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint's folder of the policy and what it says beside tensors.

    Damaged ones are passed over, as by the run that resumes.
    """
    for checkpoint in reversed(complete_checkpoints(run_folder)):
        folder = checkpoint / POLICY
        with suppress(UserError):
            read_manifest(checkpoint)
            checkpoint_checksums(checkpoint).check(folder / COMMON)
            return folder, read_common(folder)
    return None


def _peft_warnings(model: Path) -> list[str]:
    base, what = base_of(model), f"model.path={model} is a converted folder"
    if base is None:
        return [
            f"{what} that does not name its source, so exported adapters name a base that peft cannot load: convert "
            "the same source to it again, which only notes where that is"
        ]
    if not (base / "config.json").is_file():
        return [
            f"{what} of {base}, which is not there, so exported adapters name a base that peft cannot load: put it "
            "back, or convert it to model.path again from where it is, which only notes that"
        ]
    return []
