"""Start of every job: join the ranks, claim the run folder, find the checkpoint, open the monitors."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_mp.checkpoint.run_lock import run_lock
from grpo_mp.checkpoint.run_state import TrainState, check_run_folder, claim_run_folder, read_manifest, set_aside
from grpo_mp.config import TrainerSettings
from grpo_mp.config.sections import RunConfig
from grpo_mp.data.template_date import set_template_date, template_date
from grpo_mp.distributed.process_groups import Job, Parallel, broadcast, join_job, stop_parallel
from grpo_mp.monitor.progress import Progress
from grpo_mp.monitor.rank_dump import RankDumper
from grpo_mp.monitor.timeline import Timeline
from grpo_mp.monitor.watchdog import Watchdog
from grpo_mp.policy.checkpoint import load_policy, load_reference
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.exit import PreemptionHandler, ignore_more_interrupts, report_error_once
from grpo_mp.trainer.phase_manager import PhaseManager, explain_out_of_memory
from grpo_mp.trainer.save import CRITIC
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.log import log_file, logging_to

START = "START"
FindCheckpoints = Callable[[], Sequence[Path]]


@dataclass(frozen=True)
class Resumed:
    """State from which a run resumes, sentences on damaged checkpoints, and (on rank 0) on changed settings."""

    state: TrainState
    checkpoint: Path | None
    damages: Sequence[str]
    changes: Sequence[str] = ()


@dataclass(frozen=True)
class Monitors:
    """Timeline, watchdog and progress display of a rank."""

    timeline: Timeline
    watchdog: Watchdog
    progress: Progress


@dataclass(kw_only=True)
class RunContext:
    """Parts of a job that every rank has. `state`: state of the run after its last finished step."""

    settings: TrainerSettings
    job: Job
    phases: PhaseManager
    timeline: Timeline
    progress: Progress
    preemption: PreemptionHandler
    state: TrainState

    def should_stop(self) -> bool:
        """Return whether any rank received a signal to stop; equal on all ranks."""
        with self.phases.waiting():
            return self.preemption.requested(self.job.group)


@contextmanager
def join_run(
    run: RunConfig, limit_s: float, resolved: str, find_checkpoints: FindCheckpoints = tuple, engine_ranks: int = 0
) -> Iterator[tuple[Job, Resumed]]:
    """Make the process groups, claim the run folder, and find the newest undamaged checkpoint.

    `limit_s`: of a collective; `resolved`: the settings as YAML; `find_checkpoints`: returns checkpoints, newest first;
    called under the run lock.
    """
    with ExitStack() as stack:
        job = join_job(limit_s, engine_ranks)
        folder = run.folder
        rank = job.rank
        stack.enter_context(report_error_once(rank, job.store))
        checkpoints: Sequence[Path] = ()
        changes: Sequence[str] = ()
        if rank == 0:
            stack.enter_context(run_lock(folder))
            check_run_folder(folder, resolved, run.resume == "auto")  # again, under the lock
            changes = claim_run_folder(folder, resolved)
            checkpoints = find_checkpoints()
        set_template_date(broadcast(template_date(), job.group))  # ranks may start before and after midnight
        checkpoint, damages = find_whole_checkpoint(broadcast(checkpoints, job.group), job)
        stack.enter_context(logging_to(log_file(folder, rank), "info"))
        state = read_manifest(checkpoint) if checkpoint else TrainState()
        yield job, Resumed(state, checkpoint, damages, changes)


@contextmanager
def open_monitors(
    folder: Path, rank: int, steps: int, done: int, stops: Sequence[Callable[[], None]] = ()
) -> Iterator[Monitors]:
    """Open the monitors of a rank; destroy the process groups at the end. `stops`: run before the watchdog exits."""
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(folder, steps, done=done, rank=rank))
        dumper = RankDumper(rank, folder, lambda: watchdog.phases())
        before_exit = (dumper.write_last, progress.stop, *stops)
        watchdog = stack.enter_context(Watchdog(rank, folder, before_exit))
        stack.enter_context(dumper)
        timeline = Timeline(folder, rank)
        stack.callback(timeline.close)
        stack.push(ignore_more_interrupts)
        yield Monitors(timeline, watchdog, progress)
        stop_parallel()


def build_policy(
    settings: TrainerSettings,
    parallel: Parallel,
    state: TrainState,
    checkpoint: Path | None,
    with_reference: bool = False,
) -> Policy:
    """Build the policy; load its weights, and those of an updated reference, from a checked `checkpoint` if given."""
    begins = checkpoint is None or (with_reference and not state.reference_updated)  # from model.path
    policy = Policy(settings, parallel, with_reference, load_weights=begins)
    if checkpoint:
        load_policy(policy, checkpoint / "policy")
        if state.reference_updated and policy.reference:
            load_reference(policy, checkpoint / "reference")
    return policy


def build_critic(settings: TrainerSettings, parallel: Parallel, checkpoint: Path | None) -> Critic:
    """Build the critic; load its weights from a checked `checkpoint` if given. `settings`: the critic's."""
    critic = Critic(settings, parallel, load_weights=checkpoint is None)
    if checkpoint:
        load_policy(critic, checkpoint / CRITIC)
    return critic


@contextmanager
def starting(monitors: Monitors, limit_s: float) -> Iterator[None]:
    """Run the body, which builds models and starts engines, as the start of the job."""
    watchdog = monitors.watchdog
    progress = monitors.progress
    with watchdog.phase(START, limit_s), progress.phase(START), explain_out_of_memory(watchdog.rank, START, dict):
        yield


def show_notes(progress: Progress, rank: int, greeting: str, resumed: Resumed, warnings: Sequence[str]) -> None:
    """Show greeting, notes and warnings before the run starts."""
    progress.note(greeting)
    if rank == 0:
        for note in (*resumed.changes, *(f"warning: {text}" for text in (*resumed.damages, *warnings))):
            progress.note(note)


def find_whole_checkpoint(checkpoints: Iterable[Path], job: Job) -> tuple[Path | None, list[str]]:
    """Return the first undamaged checkpoint; rename the damaged ones before it and return a sentence on each.

    If all checkpoints are damaged, raise UserError and rename none.
    """
    found, damages = broadcast(_first_whole(checkpoints) if job.rank == 0 else (None, {}), job.group)
    if found is None:
        if damages:
            raise UserError(next(iter(damages.values())))
        return None, []
    notes = []
    for folder, damage in damages.items():
        if job.rank == 0:
            set_aside(folder)
        what, _, _ = damage.partition(": copy it again")
        notes.append(f"{what}: the run resumes from {found.name}; {folder.name} is now {folder.name}.damaged")
    return found, notes


def _first_whole(checkpoints: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    damages: dict[Path, str] = {}
    for folder in checkpoints:
        try:
            read_manifest(folder)
        except UserError as error:
            damages[folder] = str(error)
        else:
            return folder, damages
    return None, damages
