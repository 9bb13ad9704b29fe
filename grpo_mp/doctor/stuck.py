"""Who waits for whom in a job that does not go on: pure functions over the dumps of its ranks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_mp.doctor.findings import Finding, Level
from grpo_mp.monitor.rank_dump import Collective, RankDump

PACKAGE = re.compile(r".*/(grpo_mp/.*)")
MOST_NAMED = 8  # ranks that a sentence lists
NETWORK = "look at the network and at the GPUs of these nodes: grpo-mp doctor machine"


@dataclass(frozen=True)
class Wait:
    """A rank that waits in a collective, and what is known of the group's other ranks."""

    rank: int
    call: Collective
    group: str  # description
    ranks: tuple[int, ...]  # of the group
    absent: tuple[int, ...]  # have not made the call yet
    unknown: tuple[int, ...]  # left no dump, or made more calls since than are recorded

    def text(self) -> str:
        """Return the wait in words."""
        return f"{operation(self.call)} #{self.call.sequence} of group {self.group} (ranks {name_ranks(self.ranks)})"


@dataclass(frozen=True)
class EngineStacks:
    """The innermost frames of the main thread of an engine's process, the innermost first."""

    rank: int  # that hosts it
    process: str
    frames: tuple[str, ...]


def find_waits(dumps: Mapping[int, RankDump], over_s: float = 0.0) -> list[Wait]:
    """Return each rank's oldest collective of each group that is pending for more than `over_s` seconds."""
    waits = []
    for rank, dump in sorted(dumps.items()):
        seen = set()
        for call in dump.collectives:
            if (
                call.is_p2p
                or not call.is_pending
                or call.age_s < over_s
                or call.group in seen
                or call.group not in dump.groups
            ):
                continue
            seen.add(call.group)
            group = dump.groups[call.group]
            others = [peer for peer in group.ranks if peer != rank]
            calls = {peer: last_call(dumps[peer], call.group) if peer in dumps else None for peer in others}
            absent = tuple(peer for peer, last in calls.items() if last is not None and last < call.sequence)
            unknown = tuple(peer for peer, last in calls.items() if last is None)
            waits.append(Wait(rank, call, group.name, group.ranks, absent, unknown))
    return waits


def last_call(dump: RankDump, group: str) -> int | None:
    """Return the number of the last collective that a rank called in a group; None where the record is too short."""
    calls = [call.sequence for call in dump.collectives if call.group == group and not call.is_p2p]
    return max(calls) if calls else (0 if dump.records_all else None)


def diagnose(dumps: Mapping[int, RankDump], silent: Mapping[int, str], over_s: float = 0.0) -> list[Finding]:
    """Return what is found; a wait below `over_s` seconds is no news. `silent`: ranks without a dump, and why."""
    waits = find_waits(dumps, over_s)
    findings = [*_mismatches(dumps, waits), *_blockers(dumps, waits), *_silent(silent, waits)]
    findings = findings or _slow_collectives(waits)
    places = [place(dump) for _, dump in sorted(dumps.items())]
    nobody = "" if findings else "no rank waits for another one: they compute, or wait for their engines; "
    return [*findings, Finding(Level.OK, f"{nobody}where the ranks are", places)]


def _blockers(dumps: Mapping[int, RankDump], waits: Sequence[Wait]) -> list[Finding]:
    """Return the ranks that others wait for and that wait for nobody; or, without one, those that wait in a circle."""
    waiting = {wait.rank for wait in waits if wait.absent}
    held_up: dict[int, list[Wait]] = {}
    for wait in waits:
        for rank in wait.absent:
            held_up.setdefault(rank, []).append(wait)
    findings = []
    for rank, others in sorted(held_up.items()):
        if rank in waiting:
            continue
        who = name_ranks(dict.fromkeys(wait.rank for wait in others))
        sentence = f"rank {rank} holds up rank{'s' * (len(others) > 1)} {who}: {place(dumps[rank])}"
        evidence = [f"rank {wait.rank} waits for it since {wait.call.age_s:.0f} s in {wait.text()}" for wait in others]
        advice = "read its stack; where it waits for an engine, read logs/engine_*.log; where it computes, wait"
        findings.append(Finding(Level.ERROR, sentence, evidence[:MOST_NAMED] + main_stack(dumps[rank]), advice))
    if findings or not waiting:
        return findings
    circle = [wait for wait in waits if wait.absent]
    evidence = [f"rank {wait.rank} waits for {name_ranks(wait.absent)} in {wait.text()}" for wait in circle]
    sentence = f"ranks {name_ranks(sorted(waiting))} wait for each other in different collectives"
    advice = "a deadlock: ranks must call the collectives of all groups in one order; report it with these lines"
    return [Finding(Level.ERROR, sentence, evidence, advice)]


def _mismatches(dumps: Mapping[int, RankDump], waits: Sequence[Wait]) -> list[Finding]:
    """Return the collectives that ranks of a group call as their n-th, and that are not the same."""
    findings, seen = [], set()
    for wait in waits:
        key = wait.call.group, wait.call.sequence
        if key in seen:
            continue
        seen.add(key)
        calls = {
            rank: call
            for rank in wait.ranks
            if rank in dumps
            for call in dumps[rank].collectives
            if not call.is_p2p and (call.group, call.sequence) == key
        }
        if len({operation(call) for call in calls.values()}) > 1:
            sentence = f"ranks of group {wait.group} call different collectives as their #{wait.call.sequence}"
            evidence = [
                f"rank {rank}: {operation(call)} of {list(map(list, call.sizes))}" for rank, call in calls.items()
            ]
            findings.append(
                Finding(Level.ERROR, sentence, evidence, "a defect of the program: report it with these lines")
            )
    return findings


def _slow_collectives(waits: Sequence[Wait]) -> list[Finding]:
    """Return the collectives that all ranks of the group have called, and that do not end."""
    findings: dict[tuple[str, int], Finding] = {}
    for wait in waits:
        if not wait.absent and not wait.unknown:
            sentence = f"all ranks are in {wait.text()}, since {wait.call.age_s:.0f} s on rank {wait.rank}"
            findings.setdefault((wait.call.group, wait.call.sequence), Finding(Level.WARNING, sentence, (), NETWORK))
    return list(findings.values())


def _silent(silent: Mapping[int, str], waits: Sequence[Wait]) -> list[Finding]:
    """Return the ranks that did not answer, by reason, with what others wait in that may wait for them."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(silent.items()):
        by_reason.setdefault(reason, []).append(rank)
    findings = []
    for reason, ranks in by_reason.items():
        held_up = [wait for wait in waits if set(ranks) & set(wait.unknown)]
        evidence = [f"rank {wait.rank} waits since {wait.call.age_s:.0f} s in {wait.text()}" for wait in held_up]
        sentence = f"rank{'s' * (len(ranks) > 1)} {name_ranks(ranks)}: {reason}"
        findings.append(Finding(Level.ERROR, sentence, evidence[:MOST_NAMED]))
    return findings


def shown_engines(engines: Iterable[EngineStacks]) -> list[Finding]:
    """Return where the processes of the engines are."""
    lines = [f"rank {e.rank}, {e.process}: {' < '.join(e.frames[:3]) or 'no answer'}" for e in engines]
    return [Finding(Level.OK, "processes of engines, the innermost call first", lines)] if lines else []


def place(dump: RankDump) -> str:
    """Return where a rank is: its phase, and the innermost line of this package in its main thread."""
    phase = " > ".join(f"{phase.name} for {phase.seconds:.0f} s" for phase in dump.phases) or "no phase"
    frames = dump.threads[0].frames if dump.threads else ()
    own = [match[1] for frame in frames if (match := PACKAGE.match(frame))]
    where = f", at {own[-1]}" if own else ""
    return f"rank {dump.rank} is in {phase}{where}"


def main_stack(dump: RankDump, most: int = 6) -> list[str]:
    """Return the innermost frames of a rank's main thread, the outermost first."""
    frames = dump.threads[0].frames if dump.threads else ()
    return [f"rank {dump.rank} on {dump.host}, pid {dump.pid}:", *(f"  {frame}" for frame in frames[-most:])]


def operation(call: Collective) -> str:
    """Return 'all_reduce' of 'gloo:all_reduce'."""
    return call.operation.rpartition(":")[2]


def name_ranks(ranks: Iterable[int]) -> str:
    """Return '0, 1, 2 and 9 more'."""
    ranks = list(ranks)
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"{shown} and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else shown
