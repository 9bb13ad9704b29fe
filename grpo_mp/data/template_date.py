"""The date that chat templates write, such as Llama-3.2's: one in a whole run, also after midnight and on resume."""

from datetime import date, datetime, time

_today = [date.today()]  # of this process's run


def template_date() -> date:
    """Return the date that templates write: that of the process's start, or what `set_template_date` was given."""
    return _today[0]


def set_template_date(day: date) -> None:
    """Set the date that chat templates write."""
    _today[0] = day


def strftime_now(pattern: str) -> str:
    """Format the date of the run; templates call it by this name for the present time."""
    return datetime.combine(template_date(), time()).strftime(pattern)
