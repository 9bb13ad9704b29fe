"""The date that chat templates write into prompts: that of a run's first start."""

from datetime import date, datetime, time
from pathlib import Path

from grpo_mp.utils.files import write_json
from grpo_mp.utils.reading import read_json

INPUTS = "inputs.json"  # file of a run folder with the date
_today = [date.today()]  # one item, which set_template_date replaces


def template_date() -> date:
    """Return the date that chat templates write: by default, the date on which this process started."""
    return _today[0]


def set_template_date(day: date) -> None:
    """Set the date that chat templates write."""
    _today[0] = day


def strftime_now(pattern: str) -> str:
    """Format the date of the run; chat templates call this function by name for the current time."""
    return datetime.combine(template_date(), time()).strftime(pattern)


def use_template_date(run_folder: Path) -> None:
    """Set the date that chat templates insert to the date of the run's first start, if any."""
    if (run_folder / INPUTS).exists():
        set_template_date(date.fromisoformat(read_json(run_folder / INPUTS)["date"]))


def write_date(run_folder: Path) -> None:
    """Record the date of the run's first start."""
    if not (run_folder / INPUTS).exists():
        write_json(run_folder / INPUTS, {"date": template_date().isoformat()})
