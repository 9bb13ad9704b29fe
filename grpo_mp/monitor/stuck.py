"""Find the rank that blocks a hanging job, from the dumps of the ranks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_mp.monitor.rank_dump import Collective, Group, RankDump
from grpo_mp.utils.findings import Finding, Level

PACKAGE = re.compile(r".*/(grpo_mp/.*)")
# Name of a send or receive in torch's flight recorder: group rank of the caller, then of its peer.
P2P = re.compile(r"(?:\w+:)?(send|recv) (\d+)(?:->|<-)(\d+)")
MOST_NAMED = 8  # maximum number of ranks in a sentence
STACK_LINES = 6
NETWORK = "look at the network and at the GPUs of these nodes: grpo-mp doctor machine"


@dataclass(frozen=True)
class Wait:
    """A rank that waits in a collective, send or receive, and the members of the group for which it may wait."""

    rank: int
    call: Collective
    group: str  # description of the group
    ranks: tuple[int, ...]  # members of the group; of a send or receive, both ends
    absent: tuple[int, ...]  # members that have not made the call yet
    unknown: tuple[int, ...]  # members without a dump, or whose recorder no longer holds calls of this group

    @property
    def text(self) -> str:
        if match := P2P.fullmatch(self.call.operation):
            peer = next((rank for rank in self.ranks if rank != self.rank), self.rank)
            return f"{match[1]} {'to' if match[1] == 'send' else 'from'} rank {peer} of group {self.group}"
        return f"{operation(self.call)} #{self.call.sequence} of group {self.group} (ranks {name_ranks(self.ranks)})"

    @property
    def line(self) -> str:
        return f"rank {self.rank} waits since {self.call.age_s:.0f} s in {self.text}"


@dataclass(frozen=True)
class EngineStacks:
    """Innermost frames of the main thread of an engine process, innermost first."""

    rank: int  # host of the engine
    process: str
    frames: tuple[str, ...]
    text: str = ""  # stacks of all threads in the format of Python's faulthandler


def diagnose(dumps: Mapping[int, RankDump], silent: Mapping[int, str], over_s: float = 0.0) -> list[Finding]:
    """Return the findings about waits longer than `over_s` seconds. `silent`: rank without a dump -> reason."""
    waits = find_waits(dumps, over_s)
    findings = [*_mismatches(dumps, waits), *_blockers(dumps, waits), *_circles(waits)]
    findings += [*_silent(silent, waits), *_unrecorded(dumps, silent, waits)]
    findings = findings or _slow_collectives(waits)
    outer = [dump.phases[0] for dump in dumps.values() if dump.phases]
    longest = max(outer, key=lambda phase: phase.seconds, default=None)
    since = f", in {longest.text}" if longest else ""
    nobody = "" if findings else f"no rank waits for another one: they compute, or wait for their engines{since}; "
    places = [place(dump) for _, dump in sorted(dumps.items())]
    return [*findings, Finding(Level.OK, f"{nobody}where the ranks are", places)]


def find_waits(dumps: Mapping[int, RankDump], over_s: float = 0.0) -> list[Wait]:
    """Return the oldest pending collective, send and receive of each rank in each of its groups."""
    waits = []
    for rank, dump in sorted(dumps.items()):
        seen = set()
        for call in dump.collectives:
            key = call.group, operation(call) if call.is_p2p else ""
            if not call.is_pending or call.age_s < over_s or key in seen or call.group not in dump.groups:
                continue
            seen.add(key)
            find = _wait_for_peer if call.is_p2p else _wait_for_group
            wait = find(dumps, rank, call, dump.groups[call.group])
            waits += [wait] if wait else []
    return waits


def _wait_for_group(dumps: Mapping[int, RankDump], rank: int, call: Collective, group: Group) -> Wait:
    others = [peer for peer in group.ranks if peer != rank]
    calls = {peer: last_call(dumps[peer], call.group) if peer in dumps else None for peer in others}
    absent = tuple(peer for peer, last in calls.items() if last is not None and last < call.sequence)
    unknown = tuple(peer for peer, last in calls.items() if last is None)
    return Wait(rank, call, group.name, group.ranks, absent, unknown)


def _wait_for_peer(dumps: Mapping[int, RankDump], rank: int, call: Collective, group: Group) -> Wait | None:
    match = P2P.fullmatch(call.operation)
    if not match:
        return None  # entry of a batched call; its sends and receives have entries of their own
    peer = group.ranks[int(match[3])]
    counterpart = {"send": "recv", "recv": "send"}[match[1]], match[3], match[2]
    calls = dumps[peer].collectives if peer in dumps else ()
    theirs = [P2P.fullmatch(other.operation) for other in calls if other.is_pending and other.group == call.group]
    has_called = counterpart in [other.groups() for other in theirs if other]
    absent = () if has_called or peer not in dumps else (peer,)
    return Wait(rank, call, group.name, tuple(sorted((rank, peer))), absent, () if peer in dumps else (peer,))


def last_call(dump: RankDump, group: str) -> int | None:
    """Return the number of a rank's last collective in a group; 0: no call yet; None: dropped by the recorder."""
    calls = [call.sequence for call in dump.collectives if call.group == group and not call.is_p2p]
    return max(calls) if calls else (0 if dump.records_all else None)


def _blockers(dumps: Mapping[int, RankDump], waits: Sequence[Wait]) -> list[Finding]:
    """Report the ranks that block other ranks and do not wait themselves."""
    waiting = {wait.rank for wait in waits if wait.absent or wait.unknown}
    findings = []
    for rank in sorted({rank for wait in waits for rank in wait.absent} - waiting):
        others = [wait for wait in waits if rank in wait.absent]
        who = name_ranks(dict.fromkeys(wait.rank for wait in others))
        sentence = f"rank {rank} holds up rank{'s' * (len(others) > 1)} {who}: {place(dumps[rank])}"
        evidence = [f"rank {wait.rank} waits for it since {wait.call.age_s:.0f} s in {wait.text}" for wait in others]
        advice = "read its stack; if it waits for an engine, read logs/engine_*.log; if it computes, wait"
        findings.append(Finding(Level.ERROR, sentence, evidence[:MOST_NAMED] + main_stack(dumps[rank]), advice))
    return findings


def _circles(waits: Sequence[Wait]) -> list[Finding]:
    """Report the ranks that wait for each other in a cycle, without ranks that only wait for the cycle."""
    edges = {(wait.rank, peer) for wait in waits for peer in wait.absent}
    # Remove ranks that do not wait or that no rank waits for, until only cycles are left.
    while True:
        waiting, awaited = {rank for rank, _ in edges}, {peer for _, peer in edges}
        kept = {(rank, peer) for rank, peer in edges if rank in awaited and peer in waiting}
        if kept == edges:
            break
        edges = kept
    circle = sorted({rank for rank, _ in edges})
    if not circle:
        return []
    evidence = [
        f"rank {wait.rank} waits for {name_ranks(wait.absent)} in {wait.text}"
        for wait in waits
        if wait.rank in circle and wait.absent
    ]
    sentence = f"ranks {name_ranks(circle)} wait for each other in different collectives"
    advice = "a deadlock: ranks must call the collectives of all groups in one order; report it with these lines"
    return [Finding(Level.ERROR, sentence, evidence, advice)]


def _unrecorded(dumps: Mapping[int, RankDump], silent: Mapping[int, str], waits: Sequence[Wait]) -> list[Finding]:
    """Report waits for ranks whose recorder no longer shows whether they have made the call."""
    findings = []
    for wait in waits:
        ranks = [rank for rank in wait.unknown if rank not in silent and rank in dumps]
        if ranks and not wait.absent:
            sentence = f"{wait.line}: whether rank {name_ranks(ranks)} has called it is no longer recorded"
            evidence = [place(dumps[rank]) for rank in ranks[:MOST_NAMED]]
            advice = "run this again: suspect a rank that is in the same place both times"
            findings.append(Finding(Level.ERROR, sentence, evidence, advice))
    return findings


def _mismatches(dumps: Mapping[int, RankDump], waits: Sequence[Wait]) -> list[Finding]:
    """Report the groups whose ranks call different operations as their n-th collective."""
    findings = {}
    for wait in waits:
        key = wait.call.group, wait.call.sequence
        calls = {
            rank: call
            for rank in wait.ranks
            if rank in dumps and not wait.call.is_p2p
            for call in dumps[rank].collectives
            if not call.is_p2p and (call.group, call.sequence) == key
        }
        if len({operation(call) for call in calls.values()}) > 1:
            sentence = f"ranks of group {wait.group} call different collectives as their #{wait.call.sequence}"
            evidence = [f"rank {rank}: {operation(one)} of {[*map(list, one.sizes)]}" for rank, one in calls.items()]
            advice = "a defect of the program: report it with these lines"
            findings[key] = Finding(Level.ERROR, sentence, evidence, advice)
    return list(findings.values())


def _slow_collectives(waits: Sequence[Wait]) -> list[Finding]:
    """Report the collectives that all ranks of a group have called and that do not finish."""
    findings: dict[tuple[str, int], Finding] = {}
    for wait in waits:
        if not wait.absent and not wait.unknown:
            sentence = f"all ranks are in {wait.text}, since {wait.call.age_s:.0f} s on rank {wait.rank}"
            findings.setdefault((wait.call.group, wait.call.sequence), Finding(Level.ERROR, sentence, (), NETWORK))
    return list(findings.values())


def _silent(silent: Mapping[int, str], waits: Sequence[Wait]) -> list[Finding]:
    """Report the ranks that did not answer, by reason, with the waits that these ranks may cause."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(silent.items()):
        by_reason.setdefault(reason, []).append(rank)
    findings = []
    for reason, ranks in by_reason.items():
        evidence = [wait.line for wait in waits if set(ranks) & set(wait.unknown)]
        sentence = f"rank{'s' * (len(ranks) > 1)} {name_ranks(ranks)}: {reason}"
        findings.append(Finding(Level.ERROR, sentence, evidence[:MOST_NAMED]))
    return findings


def full_stacks(dumps: Mapping[int, RankDump], engines: Iterable[EngineStacks]) -> str:
    """Return the stacks of all threads of the ranks, innermost call last, and of the engines, innermost call first."""
    lines = []
    for rank, dump in sorted(dumps.items()):
        lines.append(f"rank {rank} on {dump.host}, pid {dump.pid}, in {_phases(dump)}")
        for thread in dump.threads:
            lines += [f"  thread {thread.name}", *(f"    {frame}" for frame in thread.frames)]
    for engine in engines:
        lines.append(f"engine of rank {engine.rank}, process {engine.process}, the innermost call first")
        lines += [f"  {line}" for line in (engine.text or "no answer").splitlines()]
    return "\n".join(lines)


def shown_engines(engines: Iterable[EngineStacks]) -> list[Finding]:
    """Return a finding with the innermost calls of all engine processes; an empty list without engines."""
    lines = [f"rank {e.rank}, {e.process}: {' < '.join(e.frames[:3]) or 'no answer'}" for e in engines]
    return [Finding(Level.OK, "processes of engines, the innermost call first", lines)] if lines else []


def place(dump: RankDump) -> str:
    """Return a sentence with a rank's phases and the innermost grpo_mp line of its main thread."""
    frames = dump.threads[0].frames if dump.threads else ()
    own = [match[1] for frame in frames if (match := PACKAGE.match(frame))]
    where = f", at {own[-1]}" if own else ""
    return f"rank {dump.rank} is in {_phases(dump)}{where}"


def _phases(dump: RankDump) -> str:
    return " > ".join(phase.text for phase in dump.phases) or "no phase"


def main_stack(dump: RankDump) -> list[str]:
    """Return a header and the innermost frames of a rank's main thread, innermost last."""
    frames = dump.threads[0].frames if dump.threads else ()
    return [f"rank {dump.rank} on {dump.host}, pid {dump.pid}:", *(f"  {frame}" for frame in frames[-STACK_LINES:])]


def operation(call: Collective) -> str:
    """Return the operation without the backend: 'all_reduce' for 'gloo:all_reduce'."""
    return call.operation.rpartition(":")[2]


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as '0, 1, 2 and 9 more'."""
    ranks = list(ranks)
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    return f"{shown} and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else shown
