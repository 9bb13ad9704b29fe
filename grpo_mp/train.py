"""The GRPO loop. `torchrun ... -m grpo_mp.train CONFIG section.key=value ...`; `--dry-run` only checks."""

import signal
from collections.abc import Sequence
from dataclasses import replace

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the seconds of imports without a trace

from grpo_mp.batching.step_batch import StepBatch, assemble_step_batch
from grpo_mp.checkpoint.run_state import FINAL, TrainState
from grpo_mp.config import Settings
from grpo_mp.monitor.timeline import merge_traces
from grpo_mp.phases import Phase
from grpo_mp.policy.policy import UpdateReport
from grpo_mp.trainer.collect import RolloutBatch, collect
from grpo_mp.trainer.command_line import run_command
from grpo_mp.trainer.context import TrainContext, newest_checkpoint, open_train_context
from grpo_mp.trainer.engine_check import check_engines
from grpo_mp.trainer.evaluation import Evaluation, answer_pairs, before_training, evaluate
from grpo_mp.trainer.logprobs import compute_logprobs
from grpo_mp.trainer.preflight import Inputs
from grpo_mp.trainer.save import export_hf, save
from grpo_mp.trainer.step_logger import StepLogger, StepRecord
from grpo_mp.trainer.update import refresh_reference, train_step
from grpo_mp.weight_sync.compare import CheckReport
from grpo_mp.weight_sync.update import SyncReport


def train(session: TrainContext) -> None:
    """Generate groups, score them, turn rewards into advantages, update the policy, give engines its weights."""
    settings, scheduler = session.settings, session.scheduler
    recorder = StepLogger(session)
    sync, check = synchronize(session)
    before = after = evaluate(session, session.state.step)
    scores = before_training(session, before)
    if session.state.step == 0:
        recorder.write(0, StepRecord(before.metrics | recorder.sync_metrics(sync, check), texts=before.texts))
    recorder.evaluated(session.state.step, scores, before.scores)
    saved_step = session.state.step
    while session.state.step < settings.run.steps and not session.should_stop():
        step = session.state.step + 1
        recorder.begin_step()

        collected = collect(session, step)
        if session.should_stop():
            break  # the step is done anew after a restart
        with scheduler.phase(Phase.SCORE):
            batch = make_batch(session, collected, step)
        with scheduler.phase(Phase.LOGPROB):
            updates = compute_logprobs(session, batch)
        with scheduler.phase(Phase.TRAIN):
            reports = train_step(session, updates)
            session.state = advanced(session.state, step, collected, reports)
            refresh_reference(session)

        sync, check = synchronize(session)
        record = recorder.step_record(collected, batch, updates, reports, (sync, check))
        if is_due(step, settings.run.eval_every, settings.run.steps):
            after = evaluate(session, step)
            record.scalars.update(after.metrics)
            record.texts.update(after.texts)
            recorder.evaluated(step, scores, after.scores)
        recorder.write(step, record)
        session.progress.step(step, record.scalars, record.scalars.get("rollout/accuracy"))
        if is_due(step, settings.run.save_every, settings.run.steps):
            save(session)
            saved_step = step
    recorder.close()
    if saved_step < session.state.step:
        save(session)
    finish(session, replace(before, scores=scores), after)


def make_batch(session: TrainContext, collected: RolloutBatch, step: int) -> StepBatch:
    """Rewards to advantages, and samples to the ranks that train on them."""
    return assemble_step_batch(
        collected.groups,
        collected.infos,
        session.inputs.scorer.weights,
        session.settings,
        session.parallel,
        session.policy.config.hidden_size,
        step,
    )


def advanced(state: TrainState, step: int, collected: RolloutBatch, reports: Sequence[UpdateReport]) -> TrainState:
    """Where the run stands after a step; what the updates adapted is in `state` already."""
    return replace(
        collected.state,
        step=step,
        optimizer_step=state.optimizer_step + len(reports),
        samples_seen=state.samples_seen + len(collected.infos),
        weight_version=state.weight_version,
        controls=state.controls,
        reference_refreshed=state.reference_refreshed,
    )


def synchronize(session: TrainContext) -> tuple[SyncReport, CheckReport]:
    """Push the policy's weights into every engine and check that the engines hold them."""
    with session.scheduler.phase(Phase.SYNC):
        report = session.sync.update_weights(session.state.optimizer_step)
    session.state = replace(session.state, weight_version=report.version)
    return report, check_engines(session)


def is_due(step: int, every: int, last: int) -> bool:
    """Every `every` steps (0: never), and at the last."""
    return step == last or (every > 0 and step % every == 0)


def finish(session: TrainContext, before: Evaluation, after: Evaluation) -> None:
    """Leave the Hugging Face folder and the merged trace, and show before and after."""
    settings = session.settings
    if session.state.step < settings.run.steps:
        session.progress.note(f"stopped after step {session.state.step}: start again to go on")
        return
    if settings.run.export:
        export_hf(session, settings.run.folder / FINAL)
    if session.is_first:
        merge_traces(settings.run.folder)
        session.progress.finish(before.scores, after.scores, answer_pairs(session, before, after))


def run(settings: Settings, inputs: Inputs) -> None:
    """Train as one rank of a started job. Raises UserError for what a user can mend."""
    with open_train_context(settings, inputs, newest_checkpoint(settings)) as session:
        train(session)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: `python -m grpo_mp.train --help`."""
    run_command(run, arguments)


if __name__ == "__main__":
    main()
