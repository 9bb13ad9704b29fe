"""Read the plan of a run, `RUN/plan.json`, as `grpo-mp plan --json` wrote it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import read_json

PLAN = "plan.json"
DOES_NOT_FIT = 1  # exit status of `grpo-mp plan`


class PlannedPhase(BaseModel):
    """What a phase of a step was to take; None or NaN where the plan does not say."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    seconds: float | None = Field(None, ge=0)
    device_bytes: float = Field(math.nan, ge=0)
    host_bytes: float = Field(math.nan, ge=0)


class PlannedRun(BaseModel):
    """What of a plan is shown beside what was measured; `phases` by name, in lower case."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    cluster: str = "unknown machines"
    ranks: int | None = Field(None, ge=1)
    nodes: int | None = Field(None, ge=1)
    layout: str = ""
    step_s: float | None = Field(None, ge=0)
    phases: dict[str, PlannedPhase] = {}


def read_plan(file: Path) -> Mapping[str, Any]:
    """Return the fields of `PlannedRun`; {} where there is no file, or an empty plan.

    Raises UserError for a file that is no plan.
    """
    tree = read_json(file) if file.exists() else {}
    if tree == {}:
        return {}
    try:
        return PlannedRun.model_validate(tree).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        says, _, _ = one_line(first["msg"]).partition(" or instance of ")
        raise UserError(f"{file}: no plan of a run ({place}: {says}): remove it") from error
