"""A checkpoint of a run, evaluated by two ranks, answers as transformers does with the folder that the run left."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_mp.checkpoint.run_state import SETTINGS, checkpoint_folder
from grpo_mp.config import dump_settings
from grpo_mp.config.data_sections import DataConfig
from grpo_mp.data.prompts import PromptReader, load_train_prompts
from grpo_mp.evaluate import read_command
from grpo_mp.utils.parsers import evaluate_parser
from tests.conftest import EVAL_PROMPTS, TinyRun
from tests.e2e.conftest import LAST_STEP, FinishedRun, StartJob, run_well
from tests.e2e.jobs import read_jsonl

LAUNCHED = (sys.executable, "-m", "grpo_mp", "evaluate", "--ranks", "2")
UPDATES = LAST_STEP * 2
RESPONSE_TOKENS = 16
GREEDY = "data.eval.arithmetic.temperature=0"
FAILS_FOR_ONE = """
def fragile(prompts, completions, **_):
    if prompts[0] == {question!r}:
        raise RuntimeError("no verdict")
    return [1.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def results(finished_run: FinishedRun, start_job: StartJob) -> Path:
    """Of the last checkpoint, in the layout that wrote it, the likeliest answers."""
    checkpoint = checkpoint_folder(finished_run.folder / "run", LAST_STEP)
    out = finished_run.folder / "evaluated"
    job = start_job(GREEDY, "--checkpoint", str(checkpoint), "--out", str(out), command=LAUNCHED)
    assert "accuracy" in run_well(job).out
    return out


@torch.no_grad()
def likeliest_answers(model: Path, questions: list[str]) -> list[str]:
    """By transformers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        written = policy.generate(prompt, do_sample=False, max_new_tokens=RESPONSE_TOKENS)[0, prompt.shape[1] :]
        answers.append(tokenizer.decode(written, skip_special_tokens=True))
    return answers


@pytest.mark.slow
def test_answers_are_those_of_the_trained_policy(results: Path, finished_run: FinishedRun, tiny_run: TinyRun) -> None:
    rows = sorted(read_jsonl(results / "samples.jsonl"), key=lambda row: row["prompt_index"])
    questions = [row["prompt"] for row in rows]
    assert len(questions) == EVAL_PROMPTS
    answers = [row["response"] for row in rows]
    assert answers == likeliest_answers(finished_run.folder / "run" / "final", questions)
    assert answers != likeliest_answers(tiny_run.model, questions)
    assert {tuple(row["weight_version"]) for row in rows} == {(UPDATES, UPDATES)}


@pytest.mark.slow
def test_scores_are_those_of_the_answers(results: Path) -> None:
    rows = read_jsonl(results / "samples.jsonl")
    report = json.loads((results / "eval.json").read_text())
    assert report["step"] == LAST_STEP
    (scores,) = report["sets"].values()
    assert scores["accuracy"] == pytest.approx(sum(row["terms"]["answer"] for row in rows) / len(rows))
    assert scores["length"] == pytest.approx(sum(row["tokens"] for row in rows) / len(rows))


def test_a_resumed_run_compares_with_the_scores_before_training(finished_run: FinishedRun) -> None:
    """And evaluates no step a second time: TensorBoard would show two images of it."""
    files = sorted((finished_run.folder / "run" / "eval").iterdir())
    steps = (0, LAST_STEP)
    assert [file.name for file in files] == [f"step_{step:06d}.json" for step in steps]
    rewards = [json.loads(file.read_text())["sets"]["arithmetic"]["reward"] for file in files]
    (row,) = (line for line in finished_run.second.out.splitlines() if "reward" in line and line.startswith("│"))
    assert [cell.strip() for cell in row.split("│")[3:5]] == [f"{rewards[0]:.3f}", f"{rewards[-1]:.3f}"]


@pytest.fixture(scope="module")
def without_checkpoint(
    finished_run: FinishedRun, tiny_run: TinyRun, start_job: StartJob, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, str]:
    """The model of before the run, with `--out` a folder that holds the run's checkpoints; a reward fails for one
    question. Folder, what the job printed, and the question.
    """
    folder = tmp_path_factory.mktemp("model_in_a_run")
    question = read_jsonl(tiny_run.config.parent / "eval.jsonl")[0]["question"]
    (folder / "reward.py").write_text(FAILS_FOR_ONE.format(question=question))
    out = folder / "run"
    shutil.copytree(finished_run.folder / "run" / "checkpoints", out / "checkpoints")
    reward = f"reward.functions={{{folder / 'reward.py'}:fragile: 1.0}}"
    rewards = (reward, "reward.on_error=0.0", "reward.correct=fragile")
    arguments = [GREEDY, *rewards, "--model", str(tiny_run.model), "--out", str(out)]
    settings = read_command(evaluate_parser().parse_intermixed_args([str(tiny_run.config), *arguments])).settings
    (out / SETTINGS).write_text(dump_settings(settings))
    return out, run_well(start_job(*arguments, command=LAUNCHED)).out, question


@pytest.mark.nightly
def test_a_run_in_the_folder_of_the_results_is_not_evaluated(
    without_checkpoint: tuple[Path, str, str], tiny_run: TinyRun
) -> None:
    rows = sorted(read_jsonl(without_checkpoint[0] / "samples.jsonl"), key=lambda row: row["prompt_index"])
    assert [row["response"] for row in rows] == likeliest_answers(tiny_run.model, [row["prompt"] for row in rows])
    report = json.loads((without_checkpoint[0] / "eval.json").read_text())
    assert (report["step"], report["checkpoint"]) == (0, None)


@pytest.mark.nightly
def test_a_reward_that_fails_is_told_and_counted(without_checkpoint: tuple[Path, str, str]) -> None:
    folder, printed, _ = without_checkpoint
    report = json.loads((folder / "eval.json").read_text())["rewards"]["arithmetic"]
    assert report["failures"] == {"fragile": 1}
    assert "no verdict" in report["first_errors"]["fragile"]
    assert "warning: arithmetic: " in printed
    assert "no verdict" in printed


@pytest.mark.nightly
def test_samples_filter_what_is_trained_on(without_checkpoint: tuple[Path, str, str], tiny_run: TinyRun) -> None:
    """A problem of which nothing says whether it is solved stays; of the others a range of pass rates keeps some."""
    folder, _, question = without_checkpoint
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)

    def kept(*rates: float) -> list[str]:
        files = {"path": str(tiny_run.config.parent / "eval.jsonl"), "pass_rates": str(folder / "samples.jsonl")}
        data = DataConfig.model_validate({"train": {"measured": files | {"pass_rate_range": rates}}})
        return [prompt.text for prompt in load_train_prompts(PromptReader(data, tokenizer, 64))]

    assert len(kept(1.0, 1.0)) == EVAL_PROMPTS
    assert kept(0.0, 0.5) == [question]
