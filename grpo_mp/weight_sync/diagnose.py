"""Which engine tensor a failed sync left wrong, found with the engine's own checksums.

A second push shows what the first did not bring; after the engine's weights were overwritten at random, a
third shows what no push reaches. The engine is not usable afterwards: the run is about to stop.
"""

from collections.abc import Mapping

Checksums = Mapping[str, str]


def describe_difference(before: Checksums, again: Checksums, restored: Checksums) -> str:
    """One sentence about the worst tensor, by the engine's own names.

    before: after the push that failed; again: after a second push; restored: after overwriting and a third.
    """
    if changed := [name for name in again if before.get(name) != again[name]]:
        return f"a second push changed {_some(changed)}: the first did not arrive whole"
    if unreached := [name for name in restored if again.get(name) != restored[name]]:
        return f"no push reaches {_some(unreached)}"
    return "every tensor arrives as it was sent: the difference lies in how the engine computes, not in its weights"


def _some(names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
