"""The GRPO loop. `torchrun ... -m grpo_mp.train CONFIG section.key=value ...`; `--dry-run` only checks."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_mp.algorithms.losses import make_loss
from grpo_mp.config import Settings, exit_with, load_settings
from grpo_mp.data.cursor import take
from grpo_mp.errors import UserError
from grpo_mp.monitor.timeline import merge_traces
from grpo_mp.scheduler.phases import Phase
from grpo_mp.trainer.batch import StepBatch, assemble, with_old, with_reference
from grpo_mp.trainer.dry_run import describe_run
from grpo_mp.trainer.evaluation import Evaluation, answer_pairs, evaluate
from grpo_mp.trainer.preflight import Inputs, check_and_read
from grpo_mp.trainer.record import Recorder
from grpo_mp.trainer.saving import export_hf, save
from grpo_mp.trainer.scores import check_engines
from grpo_mp.trainer.session import Session, local_ranks, open_session
from grpo_mp.types import MicroBatch


def train(session: Session) -> None:
    """Generate groups, score them, turn rewards into advantages, update the policy, give engines its weights."""
    settings, scheduler, policy, rollout = session.settings, session.scheduler, session.policy, session.rollout
    loss = make_loss(settings.algorithm)
    recorder = Recorder(session)
    synchronize(session)
    before = after = evaluate(session, session.state.step)
    while session.state.step < settings.run.steps:
        step = session.state.step + 1
        prompts, cursor = next_prompts(session)
        recorder.begin_step()

        with scheduler.phase(Phase.GENERATE):
            groups = rollout.generate(prompts, session.state.step * len(prompts), step, session.parallel.store)
        if session.stop.agreed(session.parallel.host):
            break
        with scheduler.phase(Phase.SCORE):
            batch = assemble(groups, settings, session.parallel, policy.config.hidden_size)
        with scheduler.phase(Phase.LOGPROB):
            updates = fixed_logprobs(session, batch)
        with scheduler.phase(Phase.TRAIN):
            reports = [policy.update(update, loss) for update in updates]

        session.state = replace(
            session.state,
            step=step,
            cursor=cursor,
            optimizer_step=session.state.optimizer_step + len(reports),
            samples_seen=session.state.samples_seen + len(batch.infos),
        )
        sync, check = synchronize(session)
        scalars = recorder.step_metrics(batch, reports, sync, check)
        if is_due(step, settings.run.eval_every, settings.run.steps):
            after = evaluate(session, step)
            scalars |= after.metrics
        recorder.write(step, scalars, groups)
        session.progress.step(step, scalars)
        stopping = session.stop.agreed(session.parallel.host)
        if stopping or is_due(step, settings.run.save_every, settings.run.steps):
            save(session)
        if stopping:
            break
    recorder.close()
    finish(session, before, after)


def next_prompts(session: Session):  # type: ignore[no-untyped-def]
    """The prompts of the next step, and the cursor behind them as it is saved."""
    settings, prompts = session.settings, session.inputs.train
    indices, cursor = take(session.cursor, len(prompts), settings.rollout.prompts_per_step, settings.data.shuffle)
    return [prompts[index] for index in indices], cursor.to_dict()


def fixed_logprobs(session: Session, batch: StepBatch) -> list[list[MicroBatch]]:
    """What stays fixed over the step's updates: the reference's logprobs, and the policy's before the first.

    With a single update the old logprobs are those of the update itself, and are not computed twice.
    """
    policy, updates = session.policy, [list(update) for update in batch.updates]
    if len(updates) > 1:
        updates = [with_old(update, policy.logprobs(update)) for update in updates]
    if policy.reference:
        updates = [with_reference(update, policy.reference_logprobs(update)) for update in updates]
    return updates


def synchronize(session: Session):  # type: ignore[no-untyped-def]
    """Push the policy's weights into every engine and check that the engines hold them."""
    with session.scheduler.phase(Phase.SYNC):
        report = session.sync.push(session.state.optimizer_step)
        session.state = replace(session.state, weight_version=report.version)
        check = check_engines(session.settings, session.policy, session.rollout, session.check_sequences)
    return report, check


def is_due(step: int, every: int, last: int) -> bool:
    """Every `every` steps (0: never), and at the last."""
    return step == last or (every > 0 and step % every == 0)


def finish(session: Session, before: Evaluation, after: Evaluation) -> None:
    """Leave the Hugging Face folder and the merged trace, and show before and after."""
    settings = session.settings
    if session.state.step < settings.run.steps:
        session.progress.note(f"stopped after step {session.state.step}: start again to go on")
        return
    if settings.run.export:
        export_hf(session, settings.run.folder / "final")
    if session.is_first:
        merge_traces(settings.run.folder)
        session.progress.finish(before.scores, after.scores, answer_pairs(session, before, after))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: a user's mistake ends with one sentence and status 2."""
    parser = argparse.ArgumentParser(prog="grpo_mp.train", description=__doc__)
    parser.add_argument("config", type=Path, help="settings file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument("--ranks", type=int, help="ranks to check a dry run for (default: those of torchrun)")
    given = parser.parse_args(arguments)
    try:
        run(load_settings(given.config, given.overrides), given.dry_run, given.ranks)
    except UserError as error:
        exit_with(error)


def run(settings: Settings, dry_run: bool = False, ranks: int | None = None) -> None:
    """Check, then train; raises UserError for everything a user can mend."""
    world_size, ranks_per_node = local_ranks()
    if dry_run and ranks:
        world_size = ranks_per_node = ranks
    inputs: Inputs = check_and_read(settings, world_size, ranks_per_node)
    if dry_run:
        if int(os.environ.get("RANK", 0)) == 0:
            print(describe_run(settings, inputs, world_size, ranks_per_node))
        return
    with open_session(settings, inputs) as session:
        train(session)


if __name__ == "__main__":
    main()
