"""A run on deterministic engines gives the same numbers again, bit for bit, also where it was killed in between."""

import signal
from pathlib import Path

import pytest
import torch

from grpo_mp.rollout.dump import read_groups
from tests.bench.kills import evidence
from tests.e2e.conftest import REWARD, StartJob, outcome
from tests.e2e.jobs import ALONE, read_jsonl, spans
from tests.e2e.test_replay import OF_ROLLOUTS, weights

pytestmark = pytest.mark.slow
STEPS = 3
PARTIAL = ("rollout.max_staleness=1", "rollout.tokens_ahead=6")
ASYNC = ("schedule=async", "engine.ranks=1", "rollout.max_staleness=2", "rollout.tokens_ahead=6", "layout={}")
TURNS = """
async def two_turns(task, policy):
    first = await policy.generate(task.messages)
    await policy.generate([*task.messages, first.message, {"role": "user", "content": "again"}])
    return policy.episode()
"""


@pytest.mark.parametrize("schedule", [PARTIAL, ASYNC], ids=["colocated", "async"])
def test_a_killed_run_gives_the_numbers_of_an_undisturbed_one(
    start_job: StartJob, tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    """A rank, or the launcher, is killed in its second step; the same command goes on to the same metrics and weights.

    Colocated, responses of the next step are begun before; the asynchronous run rolls out two turns, and its dump is
    replayed. Evaluations draw two samples of a prompt.
    """
    colocated = schedule is PARTIAL
    (tmp_path / "turns.py").write_text(TURNS)
    limits = ("rollout.limits.turn_tokens=6", "rollout.max_response_tokens=32")  # there is room for the second turn
    turns = () if colocated else (f"rollout.function={tmp_path / 'turns.py'}:two_turns", "rollout.dump=true", *limits)
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"reward.functions={{{tmp_path / 'reward.py'}:letters: 1.0}}"
    brief = ("run.save_every=1", "data.eval.arithmetic.samples=2", f"run.steps={STEPS}")
    settings = (reward, "engine.deterministic=true", *brief, *schedule, *turns)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert outcome(start_job(f"run.folder={undisturbed}", *settings)).status == 0
    job = start_job(f"run.folder={killed}", *settings)
    job.wait_until(lambda: spans(killed, int(colocated), "TRAIN") == 2)
    job.signal(signal.SIGKILL, rank=1 if colocated else None)
    killed_job = outcome(job)
    assert (killed_job.status != 0, killed_job.left) == (True, [])
    resumed = outcome(start_job(f"run.folder={killed}", *settings))
    assert (resumed.status, resumed.err) == (0, "")
    assert "resumes after step 1" in resumed.out
    steps = read_jsonl(killed / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert evidence(killed) == evidence(undisturbed)
    lags = [step["rollout/weight_version_lag/max"] for step in steps[1:]]
    assert lags == ([0, 2, 2] if colocated else [0, 2, 4])  # two updates a step
    if not colocated:
        check_replay(start_job, undisturbed, tmp_path / "replayed", *settings)


def check_replay(start_job: StartJob, run: Path, folder: Path, *settings: str) -> None:
    """The dump of episodes trains the same policy, without engines; what they were given is masked."""
    dump = run / "rollouts_dump"
    groups = [group for file in dump.rglob("*.parquet") for group, _ in read_groups(file)]
    samples = [sample for group in groups for sample in group.samples]
    assert samples
    assert all(0 < sample.given_tokens < len(sample.tokens) for sample in samples)
    replayed = outcome(start_job(f"run.folder={folder}", *settings, "--replay", str(dump), command=ALONE))
    assert (replayed.status, replayed.err, replayed.left) == (0, "", [])
    steps, again = (read_jsonl(one / "metrics.jsonl")[-STEPS:] for one in (run, folder))
    for one, other in zip(steps, again, strict=True):
        assert {name: one[name] for name in other if name.startswith(OF_ROLLOUTS)} == {
            name: value for name, value in other.items() if name.startswith(OF_ROLLOUTS)
        }
    before, after = weights(run), weights(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
