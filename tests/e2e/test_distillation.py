"""On-policy distillation: the teacher's logprobs, the metrics made of them, and a policy that comes nearer to it."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import TinyRun
from tests.e2e.conftest import StartJob, run_well
from tests.e2e.jobs import read_jsonl
from tools.tiny.models import make_tiny

pytestmark = pytest.mark.nightly
STEPS = 10
TOPK = 8
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "initializer_range": 0.2}


@torch.no_grad()
def expected_tables(folder: Path, rows: list[dict]) -> list[torch.Tensor]:
    """What transformers says in the place of each token of each response, [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row in rows:
        table = model(torch.tensor([[*row["prompt_tokens"], *row["tokens"]]])).logits[0].log_softmax(-1)
        found.append(table[len(row["prompt_tokens"]) - 1 : -1])
    return found


def dumped_rows(run: Path, step: int) -> list[dict]:
    files = sorted((run / "rollouts_dump" / f"step_{step:06d}").glob("rank_*.parquet"))
    rows = [row for file in files for row in parquet.read_table(file).to_pylist()]
    assert len(rows) == 4 * 4
    return rows


def logprobs_of(rows: list[dict], tables: list[torch.Tensor]) -> list[list[float]]:
    """Return the logprobs of each row's tokens."""
    return [
        table.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0].tolist()
        for row, table in zip(rows, tables, strict=True)
    ]


def prefer_some_tokens(folder: Path) -> None:
    """Make a random model prefer the same tokens everywhere, by a common part of all embeddings."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"] += 0.5
    save_file(weights, file, metadata={"format": "pt"})


def check_topk(rows: list[dict], tables: list[torch.Tensor], line: dict) -> None:
    """The most likely tokens are those of transformers, and have the share of its probability that was measured."""
    mass = list[torch.Tensor]()
    for row, table in zip(rows, tables, strict=True):
        ids, logprobs = (
            torch.frombuffer(bytearray(row[name]), dtype=dtype).reshape(-1, TOPK)
            for name, dtype in (("teacher_topk_ids", torch.int32), ("teacher_topk_logprobs", torch.float32))
        )
        torch.testing.assert_close(logprobs, table.topk(TOPK, 1).values, atol=1e-3, rtol=0)
        torch.testing.assert_close(logprobs, table.gather(1, ids.long()), atol=1e-3, rtol=0)
        mass.append(logprobs.exp().sum(1))
    # A mean of updates of unequal sizes.
    assert line["distill/teacher_mass"] == pytest.approx(float(torch.cat(mass).mean()), abs=2e-2)
    assert 0 < line["distill/student_mass"] < 1
    assert line["distill/kl/mean"] < line["distill/kl/max"]
    assert line["train/pg_loss"] == 0
    assert line["train/loss"] > 0


@pytest.mark.parametrize("changes", ["coef: 1.0", f"topk: {TOPK}, kl_type: mixed"], ids=["sampled", "topk"])
def test_the_policy_comes_nearer_to_a_teacher_that_the_job_serves(
    changes: str, start_job: StartJob, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """A dense teacher over both ranks; then the same updates from the dump, where no teacher is asked."""
    teacher = tmp_path / "teacher"
    run = tmp_path / "run"
    again = tmp_path / "again"
    make_tiny(teacher, "qwen3", AutoTokenizer.from_pretrained(tiny_run.model), 1, **SHAPE)
    prefer_some_tokens(teacher)
    settings = (
        f"algorithm.distillation={{teacher: {{path: {teacher}, args: {{tp_size: 2}}}}, {changes}}}",
        "algorithm.kl.coef=0",
        "algorithm.aggregation=token_mean",
        "optimizer.lr=5e-3",
        "optimizer.lr_schedule=constant",
        f"run.steps={STEPS}",
        "data.eval={}",
    )
    run_well(start_job(f"run.folder={run}", "rollout.dump=true", *settings))
    lines = read_jsonl(run / "metrics.jsonl")[1:]
    for line in lines:
        rows = dumped_rows(run, line["step"])
        tables = expected_tables(teacher, rows)
        for row, expected in zip(rows, logprobs_of(rows, tables), strict=True):
            assert row["teacher_logprobs"] == pytest.approx(expected, abs=1e-3)
        own, theirs = (np.concatenate([row[name] for row in rows]) for name in ("rollout_logprobs", "teacher_logprobs"))
        assert line["distill/reverse_kl/mean"] == pytest.approx((own - theirs).mean(), abs=1e-3)
        assert line["distill/reverse_kl/max"] == pytest.approx((own - theirs).max(), abs=1e-2)
        if "topk" in changes:
            check_topk(rows, tables, line)
    measured = ["distill/reverse_kl/mean", *(["distill/kl/mean"] if "topk" in changes else [])]
    for name in measured:
        divergence = [line[name] for line in lines]
        assert statistics.fmean(divergence[-4:]) < 0.7 * statistics.fmean(divergence[:2]), divergence
    assert "Prefill batch" in (run / "logs" / "teacher_0.log").read_text()
    assert not (run / "logs" / "teacher_1.log").exists()

    run_well(start_job(f"run.folder={again}", *settings, "--replay", str(run / "rollouts_dump")))
    for before, after in zip(lines, read_jsonl(again / "metrics.jsonl")[-STEPS:], strict=True):
        names = (*measured, "train/loss", "train/grad_norm")
        assert [after[name] for name in names] == [before[name] for name in names]
    assert not list(again.glob("logs/teacher_*"))


def check_self_taught(rows: list[dict], line: dict, tiny_run: TinyRun) -> None:
    """In the first step the policy still is its model, also after the teacher's prompts, which show the answers."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    shown = [row | {"prompt_tokens": row["teacher_prompt"] or row["prompt_tokens"]} for row in rows]
    assert any(row["teacher_prompt"] for row in rows)
    for row in (row for row in rows if row["teacher_prompt"]):
        assert f"#### {row['answer']}\n\nNow answer with a response" in tokenizer.decode(row["teacher_prompt"])
    policy, own = (logprobs_of(rows, expected_tables(tiny_run.model, each)) for each in (rows, shown))
    differences = [
        old - (teacher if row["teacher_prompt"] else served)
        for row, olds, teachers in zip(rows, policy, own, strict=True)
        for old, teacher, served in zip(olds, teachers, row["teacher_logprobs"] or olds, strict=True)
    ]
    assert line["distill/taught_share"] == 1
    assert line["distill/reverse_kl/mean"] == pytest.approx(statistics.fmean(differences), abs=1e-3)
    assert line["distill/reverse_kl/max"] == pytest.approx(max(differences), abs=1e-2)


def test_each_set_is_scored_by_a_teacher_of_its_own(start_job: StartJob, tiny_run: TinyRun, tmp_path: Path) -> None:
    """The job serves two teachers; the third set is taught by the policy, which sees the answer of the row."""
    run = tmp_path / "run"
    lines = tiny_run.train.read_text().splitlines(keepends=True)
    teachers = list[str]()
    sets = list[str]()
    prompts = [lines[0::3], lines[1::3], lines[2::3]]
    (tmp_path / "third.jsonl").write_text("".join(prompts[2]))
    for number, name in enumerate(("first", "second")):
        make_tiny(tmp_path / name, "qwen3", AutoTokenizer.from_pretrained(tiny_run.model), 1 + number, **SHAPE)
        (tmp_path / f"{name}.jsonl").write_text("".join(prompts[number]))
        teachers.append(f"{name}: {{path: {tmp_path / name}}}")
        sets.append(f"{name}: {{path: {tmp_path / name}.jsonl}}")
    teachers.append("third: {path: self:answer}")
    sets.append(f"third: {{path: {tmp_path / 'third'}.jsonl}}")
    asked = [{json.loads(line)["question"] for line in of_set} for of_set in prompts]
    run_well(
        start_job(
            f"run.folder={run}",
            "rollout.dump=true",
            f"data.train={{{', '.join(sets)}}}",
            f"algorithm.distillation.teacher={{{', '.join(teachers)}}}",
            "run.steps=2",
            "rollout.max_prompt_tokens=256",
            "data.eval={}",
        )
    )
    rows = [*dumped_rows(run, 1), *dumped_rows(run, 2)]
    numbers = [next(i for i, questions in enumerate(asked) if row["prompt"] in questions) for row in rows]
    assert {*numbers} == {0, 1, 2}
    both = [logprobs_of(rows, expected_tables(tmp_path / name, rows)) for name in ("first", "second")]
    for row, number, *served in zip(rows, numbers, *both, strict=True):
        assert bool(row["teacher_prompt"]) == (number == 2)
        if number == 2:
            assert row["teacher_logprobs"] == []
            continue
        assert row["teacher_logprobs"] == pytest.approx(served[number], abs=1e-3)
        assert row["teacher_logprobs"] != pytest.approx(served[1 - number], abs=1e-1)
    check_self_taught(rows[: len(rows) // 2], read_jsonl(run / "metrics.jsonl")[1], tiny_run)
    for name in ("first", "second"):
        assert "Prefill batch" in (run / "logs" / f"teacher.{name}_0.log").read_text()
