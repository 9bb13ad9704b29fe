"""What a finished run leaves in its folder."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mp.checkpoint.run_state import checkpoint_folder
from grpo_mp.config import Settings, load_settings
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.trainer.engine_check import sequence_logprobs
from tests.conftest import TinyRun
from tests.e2e.conftest import LAST_STEP, FinishedRun, finished_settings
from tests.e2e.jobs import read_jsonl
from tests.engines import started_engine
from tests.one_rank import one_rank_job
from tests.save_policy import save_policy

STEPS = list(range(1, LAST_STEP + 1))


@pytest.fixture(scope="module")
def run(finished_run: FinishedRun) -> Path:
    return finished_run.folder / "run"


@pytest.fixture(scope="module")
def settings(run: Path) -> Settings:
    return load_settings(run / "settings.yaml")


@pytest.fixture(scope="module")
def metrics(run: Path) -> list[dict]:
    return read_jsonl(run / "metrics.jsonl")


def test_resolved_settings_are_those_that_were_given(
    settings: Settings, finished_run: FinishedRun, tiny_run: TinyRun
) -> None:
    overrides = [*finished_settings(finished_run.folder), f"run.steps={LAST_STEP}"]
    assert settings == load_settings(tiny_run.config, overrides)


def test_events_hold_the_metrics_under_documented_names(run: Path, metrics: list[dict]) -> None:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()
    assert {find_metric(name, "scalar").name for name in tags["scalars"]}
    assert set(tags["scalars"]) == {name for line in metrics for name in line} - {"step"}
    for name in ("reward/mean", "train/grad_norm"):
        assert [event.step for event in events.Scalars(name)] == STEPS
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in metrics[1:]])
    assert "reward/values" in tags["histograms"]


def test_nothing_of_a_job_on_one_machine_listens_on_a_network(finished_run: FinishedRun) -> None:
    assert set(finished_run.listening) == {"127.0.0.1"}
    assert len(finished_run.listening) > 4  # the launcher's store, engines, and gloo's of both ranks


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_no_engine_serves_another_user_of_the_machine(finished_run: FinishedRun) -> None:
    """Of all ports those that speak HTTP are the engines', which ask for the run's key; the others hang up or wait."""
    served = [answer for answer in finished_run.answers.values() if answer.startswith(b"HTTP")]
    assert served == [b"HTTP/1.1 401"] * 2
    assert len(finished_run.answers) > 4


def test_an_export_is_there_before_the_checkpoint_that_passes_it(run: Path) -> None:
    """A start behind that checkpoint does not make it."""
    export = run / "exports" / f"step_{LAST_STEP:06d}"
    policy = checkpoint_folder(run, LAST_STEP) / "policy"
    exported = [file.stat().st_mtime for file in export.glob("*.safetensors")]
    saved = [file.stat().st_mtime for file in policy.glob("**/*.bin")]
    assert max(exported) < min(saved)


def test_every_step_learns(metrics: list[dict]) -> None:
    assert all(line["train/grad_norm"] > 0 and line["reward/std"] > 0 for line in metrics[1:])
    assert metrics[1]["reward/term/letters"] > 0


def test_engine_and_policy_agree_after_every_sync(metrics: list[dict]) -> None:
    """Step 0 is the sync before the first step."""
    assert [line["step"] for line in metrics] == [0, *STEPS]
    assert all(line["sync/check/logprob_abs_diff/mean"] <= 1e-4 for line in metrics)
    assert all(line["mismatch/logprob_abs_diff/mean"] <= 1e-4 for line in metrics[1:])


def test_evaluation_before_and_after(metrics: list[dict]) -> None:
    assert [line["step"] for line in metrics if "eval/arithmetic/accuracy" in line] == [0, LAST_STEP]


def test_shares_of_the_time_are_there(metrics: list[dict]) -> None:
    assert all(0 <= line["time/overhead_share"] < 1 and 0 <= line["time/idle_share"] < 1 for line in metrics[1:])


def test_the_trace_holds_both_ranks_and_all_phases(run: Path) -> None:
    events = json.loads((run / "trace.json").read_text())
    begun = {(event["pid"], event["name"]) for event in events if event["ph"] == "B"}
    phases = ("GENERATE", "SCORE", "LOGPROB", "TRAIN", "SYNC", "SAVE", "EVAL")
    assert begun >= {(rank, phase) for rank in (0, 1) for phase in phases}
    assert sum(event["ph"] == "B" for event in events) == sum(event["ph"] == "E" for event in events)


def test_sampled_answers_are_there_of_the_steps_before_and_after_the_stop(run: Path, finished_run: FinishedRun) -> None:
    """Of all groups of every step, whichever engine took them."""
    rows = {int(file.stem.removeprefix("step_")): read_jsonl(file) for file in run.glob("samples/step_*.jsonl")}
    assert {step: len(row) for step, row in rows.items()} == dict.fromkeys(STEPS, 16)
    assert finished_run.stopped_after in STEPS[:-1]
    for row in (row for step in rows.values() for row in step):
        assert row["reward"] == pytest.approx(row["terms"]["letters"] + _rule_reward(row))


def test_the_report_was_written_at_the_end(run: Path, metrics: list[dict]) -> None:
    page = (run / "report.html").read_text()
    assert f"{LAST_STEP} of {LAST_STEP}" in page


def test_answers_to_the_same_questions_before_and_after(run: Path) -> None:
    before, after = (read_jsonl(run / "samples" / f"eval_{step:06d}.jsonl") for step in (0, LAST_STEP))
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]
    assert {row["set"] for row in before} == {"arithmetic"}


def _rule_reward(row: dict) -> float:
    return 1.0 * row["terms"]["answer"] + 0.5 * row["terms"]["boxed"]


@pytest.fixture(scope="module")
def first_policy(settings: Settings) -> Iterator[Policy]:
    """The policy before any update, on one rank."""
    single = settings.model_copy(update={"layout": settings.layout.model_copy(update={"expert": 1})})
    with one_rank_job() as parallel:
        yield Policy(single, parallel, with_reference=False)


@pytest.fixture(scope="module")
def saved_scores(run: Path, first_policy: Policy) -> tuple[list[tuple[int, ...]], list[list[float]]]:
    """Fixed sequences, and their logprobs by the policy of the last checkpoint: one rank loads what two saved."""
    load_policy(first_policy, checkpoint_folder(run, LAST_STEP) / "policy")
    generator = torch.Generator().manual_seed(1)
    vocabulary = first_policy.hf.int("vocab_size")
    sequences = [tuple(row) for row in torch.randint(vocabulary, (4, 48), generator=generator).tolist()]
    return sequences, sequence_logprobs(first_policy, sequences)


def test_a_policy_can_be_saved_before_its_first_update(first_policy: Policy, tmp_path: Path) -> None:
    """A signal in the first step, or a first gradient that is not finite, must not end in an error."""
    save_policy(first_policy, tmp_path)
    load_policy(first_policy, tmp_path)


def test_transformers_loads_the_final_folder_and_agrees_with_the_policy(
    run: Path, saved_scores: tuple[list[tuple[int, ...]], list[list[float]]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32).eval()
    for sequence, scores in zip(*saved_scores, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert torch.allclose(torch.tensor(scores), expected, atol=2e-5)


@pytest.mark.slow
def test_sglang_serves_the_final_folder_and_agrees_with_the_policy(
    run: Path, saved_scores: tuple[list[tuple[int, ...]], list[list[float]]], tmp_path: Path
) -> None:
    sequences, scores = saved_scores
    spec = EngineSpec(index=0, rank=0, model=run / "final", dtype="float32", context_tokens=64, cpu=True, threads=2)

    async def ask(engine: EngineProcess) -> list[list[float]]:
        async with aclosing(EngineClient(0, engine.url, engine.headers, 60.0)) as client:
            return await client.score(sequences)

    with started_engine(spec, tmp_path / "engine.log") as engine:
        engine.wait_ready(300.0)
        actual = asyncio.run(ask(engine))
    for sequence, expected in zip(actual, scores, strict=True):
        assert sequence == pytest.approx(expected, abs=1e-4)


def test_training_has_changed_the_weights(run: Path, tiny_run: TinyRun) -> None:
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (tiny_run.model, run / "final")
    )
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2


def test_folders_are_exported_while_the_run_goes_on(run: Path) -> None:
    assert sorted(folder.name for folder in (run / "exports").iterdir()) == ["step_000002", "step_000004"]
    last, final = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (run / "exports" / "step_000004", run / "final")
    )
    assert last.keys() == final.keys()
    assert all(torch.equal(last[name], final[name]) for name in final)


def test_the_final_folder_has_the_tokenizer(run: Path, tiny_run: TinyRun) -> None:
    chat = [{"role": "user", "content": "Tom has 3 apples."}]
    first, last = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_run.model, run / "final"))
    assert first.apply_chat_template(chat)["input_ids"] == last.apply_chat_template(chat)["input_ids"]
