"""Who waits for whom in a job that does not go on: pure functions over the dumps of its ranks."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_mp.monitor.rank_dump import Collective, Group, RankDump
from grpo_mp.utils.findings import Finding, Level

PACKAGE = re.compile(r".*/(grpo_mp/.*)")
P2P = re.compile(
    r"(?:\w+:)?(send|recv) (\d+)(?:->|<-)(\d+)"
)  # by torch's recorder: places in the group, the caller's first
# Files whose frames are those of a rank in a send or receive: torch's recorder of gloo has no entry for these.
SENDS = re.compile(
    r"pipeline_parallel/p2p_communication\.py:|distributed_c10d\.py:\d+ (?:i?send|i?recv|batch_isend_irecv)$"
)
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
        if match := P2P.fullmatch(self.call.operation):
            peer = next(rank for rank in self.ranks if rank != self.rank) if len(self.ranks) > 1 else self.rank
            return f"{match[1]} {'to' if match[1] == 'send' else 'from'} rank {peer} of group {self.group}"
        return f"{operation(self.call)} #{self.call.sequence} of group {self.group} (ranks {name_ranks(self.ranks)})"


@dataclass(frozen=True)
class EngineStacks:
    """The innermost frames of the main thread of an engine's process, the innermost first."""

    rank: int  # that hosts it
    process: str
    frames: tuple[str, ...]
    text: str = ""  # of all its threads, as Python's faulthandler writes them


def find_waits(dumps: Mapping[int, RankDump], over_s: float = 0.0) -> list[Wait]:
    """Return what each rank waits in for more than `over_s` seconds.

    Of each group its oldest pending collective, and of each peer in it the oldest pending send and receive.
    """
    waits = []
    for rank, dump in sorted(dumps.items()):
        seen = set()
        for call in dump.collectives:
            key = call.group, operation(call) if call.is_p2p else ""
            if not call.is_pending or call.age_s < over_s or key in seen or call.group not in dump.groups:
                continue
            seen.add(key)
            group = dump.groups[call.group]
            wait = (
                _wait_for_peer(dumps, rank, call, group) if call.is_p2p else _wait_for_group(dumps, rank, call, group)
            )
            waits += [wait] if wait else []
    return waits


def _wait_for_group(dumps: Mapping[int, RankDump], rank: int, call: Collective, group: Group) -> Wait:
    others = [peer for peer in group.ranks if peer != rank]
    calls = {peer: last_call(dumps[peer], call.group) if peer in dumps else None for peer in others}
    absent = tuple(peer for peer, last in calls.items() if last is not None and last < call.sequence)
    unknown = tuple(peer for peer, last in calls.items() if last is None)
    return Wait(rank, call, group.name, group.ranks, absent, unknown)


def _wait_for_peer(dumps: Mapping[int, RankDump], rank: int, call: Collective, group: Group) -> Wait | None:
    """Return the wait in a send or receive, whose peer has called the other one where that is pending, too."""
    match = P2P.fullmatch(call.operation)
    if not match:
        return None  # the entry of several together: each has its own, too
    peer = group.ranks[int(match[3])]
    counterpart = {"send": "recv", "recv": "send"}[match[1]], match[3], match[2]
    calls = dumps[peer].collectives if peer in dumps else ()
    theirs = [P2P.fullmatch(other.operation) for other in calls if other.is_pending and other.group == call.group]
    has_called = counterpart in [other.groups() for other in theirs if other]
    absent = () if has_called or peer not in dumps else (peer,)
    return Wait(rank, call, group.name, tuple(sorted((rank, peer))), absent, () if peer in dumps else (peer,))


def last_call(dump: RankDump, group: str) -> int | None:
    """Return the number of the last collective that a rank called in a group; None where the record is too short."""
    calls = [call.sequence for call in dump.collectives if call.group == group and not call.is_p2p]
    return max(calls) if calls else (0 if dump.records_all else None)


def diagnose(dumps: Mapping[int, RankDump], silent: Mapping[int, str], over_s: float = 0.0) -> list[Finding]:
    """Return what is found; a wait below `over_s` seconds is no news. `silent`: ranks without a dump, and why."""
    waits = find_waits(dumps, over_s)
    findings = [*_mismatches(dumps, waits), *_blockers(dumps, waits), *_circles(waits), *_silent(silent, waits)]
    findings += [*_unrecorded(dumps, silent, waits), *_unrecorded_sends(dumps, waits, over_s)]
    findings = findings or _slow_collectives(waits)
    places = [place(dump) for _, dump in sorted(dumps.items())]
    outer = [dump.phases[0] for dump in dumps.values() if dump.phases]
    longest = max(outer, key=lambda phase: phase.seconds, default=None)
    since = f", in {longest.text}" if longest else ""
    nobody = "" if findings else f"no rank waits for another one: they compute, or wait for their engines{since}; "
    return [*findings, Finding(Level.OK, f"{nobody}where the ranks are", places)]


def _blockers(dumps: Mapping[int, RankDump], waits: Sequence[Wait]) -> list[Finding]:
    """Return the ranks that others wait for and that wait for nobody."""
    waiting = {wait.rank for wait in waits if wait.absent or wait.unknown}
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
    return findings


def _circles(waits: Sequence[Wait]) -> list[Finding]:
    """Return the ranks that wait for each other in a circle, those that only lead into it left out."""
    edges = {(wait.rank, peer) for wait in waits for peer in wait.absent}
    while True:
        kept = {
            (rank, peer) for rank, peer in edges if {rank} <= {p for _, p in edges} and {peer} <= {r for r, _ in edges}
        }
        if kept == edges:
            break
        edges = kept
    circle = sorted({rank for rank, _ in edges})
    if not circle:
        return []
    evidence = [
        f"rank {wait.rank} waits for {name_ranks(wait.absent)} in {wait.text()}"
        for wait in waits
        if wait.rank in circle and wait.absent
    ]
    sentence = f"ranks {name_ranks(circle)} wait for each other in different collectives"
    advice = "a deadlock: ranks must call the collectives of all groups in one order; report it with these lines"
    return [Finding(Level.ERROR, sentence, evidence, advice)]


def _behind(ranks: Iterable[int], waits: Sequence[Wait]) -> list[Wait]:
    """Return the waits that some ranks hold up, through others, too; those for them in the first place left out."""
    reached, found = set(ranks), list[Wait]()
    while more := [wait for wait in waits if wait not in found and reached & {*wait.absent, *wait.unknown}]:
        found += more
        reached |= {wait.rank for wait in more}
    return [wait for wait in found if not {*ranks} & {*wait.absent, *wait.unknown}]


def _unrecorded(dumps: Mapping[int, RankDump], silent: Mapping[int, str], waits: Sequence[Wait]) -> list[Finding]:
    """Return the waits for ranks that have made more calls since than they remember: nobody is to blame by these."""
    findings = []
    for wait in waits:
        ranks = [rank for rank in wait.unknown if rank not in silent and rank in dumps]
        if ranks and not wait.absent:
            sentence = (
                f"rank {wait.rank} waits since {wait.call.age_s:.0f} s in {wait.text()}: whether rank "
                f"{name_ranks(ranks)} has called it is no longer recorded"
            )
            evidence = [place(dumps[rank]) for rank in ranks[:MOST_NAMED]]
            findings.append(Finding(Level.ERROR, sentence, evidence, "ask again: one that is in its place both times"))
    return findings


def _unrecorded_sends(dumps: Mapping[int, RankDump], waits: Sequence[Wait], over_s: float) -> list[Finding]:
    """Return the ranks whose stack is in a send or receive that the recorder does not have: gloo's."""
    recorded = {wait.rank for wait in waits}
    ranks = [
        rank
        for rank, dump in sorted(dumps.items())
        if rank not in recorded
        and dump.threads
        and any(SENDS.search(frame) for frame in dump.threads[0].frames)
        and dump.phases
        and dump.phases[-1].seconds >= over_s
    ]
    if not ranks:
        return []
    sentence = (
        f"rank{'s' * (len(ranks) > 1)} {name_ranks(ranks)}: in a send or receive, which this backend does not record"
    )
    evidence = [line for rank in ranks[:MOST_NAMED] for line in main_stack(dumps[rank])]
    advice = "look at the pipeline's ranks before and after: one that is in no send or receive holds them up"
    return [Finding(Level.WARNING, sentence, evidence, advice)]


def _mismatches(dumps: Mapping[int, RankDump], waits: Sequence[Wait]) -> list[Finding]:
    """Return the collectives that ranks of a group call as their n-th, and that are not the same."""
    findings, seen = [], set()
    for wait in waits:
        key = wait.call.group, wait.call.sequence
        if key in seen or wait.call.is_p2p:
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
            findings.setdefault((wait.call.group, wait.call.sequence), Finding(Level.ERROR, sentence, (), NETWORK))
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
        evidence += [
            f"rank {wait.rank} waits behind them since {wait.call.age_s:.0f} s in {wait.text()}"
            for wait in _behind(ranks, waits)
        ]
        sentence = f"rank{'s' * (len(ranks) > 1)} {name_ranks(ranks)}: {reason}"
        findings.append(Finding(Level.ERROR, sentence, evidence[:MOST_NAMED]))
    return findings


def full_stacks(dumps: Mapping[int, RankDump], engines: Iterable[EngineStacks]) -> str:
    """Return the stacks of all threads of every rank, the innermost call last, and those of the engines' processes."""
    lines = []
    for rank, dump in sorted(dumps.items()):
        phases = " > ".join(phase.text for phase in dump.phases) or "no phase"
        lines.append(f"rank {rank} on {dump.host}, pid {dump.pid}, in {phases}")
        for thread in dump.threads:
            lines += [f"  thread {thread.name}", *(f"    {frame}" for frame in thread.frames)]
    for engine in engines:
        lines.append(f"engine of rank {engine.rank}, process {engine.process}, the innermost call first")
        lines += [f"  {line}" for line in (engine.text or "no answer").splitlines()]
    return "\n".join(lines)


def shown_engines(engines: Iterable[EngineStacks]) -> list[Finding]:
    """Return where the processes of the engines are."""
    lines = [f"rank {e.rank}, {e.process}: {' < '.join(e.frames[:3]) or 'no answer'}" for e in engines]
    return [Finding(Level.OK, "processes of engines, the innermost call first", lines)] if lines else []


def place(dump: RankDump) -> str:
    """Return where a rank is: its phase, and the innermost line of this package in its main thread."""
    phase = " > ".join(phase.text for phase in dump.phases) or "no phase"
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
