"""`python -m grpo_mp.evaluate` with a real engine, on a model whose answers are known: \\boxed{2}, {3} or {4}."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_mp.evaluate import main, read_command
from grpo_mp.utils.parsers import evaluate_parser
from tests.conftest import TinyRun
from tools.tiny.models import BOXED, END, make_tiny, make_tokenizer

CHANCES = {"2": 0.5, "3": 0.3, "4": 0.2}
ANSWERS = ("2", "3", "4", "9", "2", "3")  # expected, by problem
SAMPLES = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its next token depends on the last one alone: layers add nothing, the head is solved for the wanted logits."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer([])
    make_tiny(folder, "llama", tokenizer, num_hidden_layers=2)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    next_tokens = {
        "<|assistant|>": {BOXED: 1.0},
        BOXED: CHANCES,
        **{digit: {"}": 1.0} for digit in CHANCES},
        "}": {END: 1.0},
    }
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in [*next_tokens, END]}
    logits = torch.full((len(next_tokens), policy.config.vocab_size), -20.0)
    for row, chances in enumerate(next_tokens.values()):
        for token, chance in chances.items():
            logits[row, ids[token]] = math.log(chance)
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        policy.model.norm.weight.fill_(1.0)
        embeddings = policy.model.embed_tokens.weight[[ids[token] for token in next_tokens]]
        normed = embeddings * (embeddings.pow(2).mean(-1, keepdim=True) + policy.config.rms_norm_eps).rsqrt()
        policy.lm_head.weight.copy_((torch.linalg.pinv(normed) @ logits).T)
    policy.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def results(model: Path, tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One evaluation of four sets, by one process that no launcher started."""
    folder = tmp_path_factory.mktemp("evaluation")
    rows = [{"question": f"Problem {number}?", "answer": answer} for number, answer in enumerate(ANSWERS)]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    defaults: dict[str, Any] = {"path": str(folder / "eval.jsonl")}
    sets = {
        "sampled": defaults | {"samples": SAMPLES},
        "greedy": defaults | {"temperature": 0, "max_prompts": 5},
        "nucleus": defaults | {"samples": 2, "top_p": 0.4},
        "cut": defaults | {"samples": 2, "max_response_tokens": 2},
    }
    overrides = [f"data.eval={json.dumps(sets)}", "data.train=none.jsonl", "reward.boxed=0"]
    main([str(tiny_run.config), *overrides, "--model", str(model), "--out", str(folder / "out")])
    return folder / "out"


@pytest.fixture(scope="module")
def scores(results: Path) -> dict[str, dict[str, Any]]:
    return json.loads((results / "eval.json").read_text())["sets"]


@pytest.fixture(scope="module")
def answers(results: Path) -> dict[str, list[list[str]]]:
    """By set and problem: what stands in the boxes."""
    answers: dict[str, list[list[str]]] = {}
    for line in (results / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        set_answers = answers.setdefault(row["set"], [[] for _ in ANSWERS])
        set_answers[row["prompt_index"]].append(row["response"].removeprefix(BOXED).removesuffix("}"))
    return answers


def test_each_problem_has_its_samples(answers: dict[str, list[list[str]]]) -> None:
    assert {name: [len(samples) for samples in problems] for name, problems in answers.items()} == {
        "sampled": [SAMPLES] * 6,
        "greedy": [1] * 5 + [0],
        "nucleus": [2] * 6,
        "cut": [2] * 6,
    }
    assert set(chain.from_iterable(answers["sampled"])) == CHANCES.keys()


def test_each_set_is_sampled_its_own_way(
    answers: dict[str, list[list[str]]], scores: dict[str, dict[str, Any]]
) -> None:
    assert set(chain.from_iterable(answers["greedy"] + answers["nucleus"])) == {"2"}
    assert (scores["greedy"]["accuracy"], scores["nucleus"]["accuracy"]) == pytest.approx((2 / 5, 2 / 6))
    assert (scores["cut"]["accuracy"], scores["cut"]["truncated_ratio"], scores["cut"]["length"]) == (0, 1, 2)
    assert (scores["sampled"]["truncated_ratio"], scores["sampled"]["length"]) == (0, 4)


def test_scores_are_means_over_every_draw_of_the_samples(
    answers: dict[str, list[list[str]]], scores: dict[str, dict[str, Any]]
) -> None:
    def passes(drawn: tuple[str, ...], right: str) -> float:
        return float(right in drawn)

    def majority(drawn: tuple[str, ...], right: str) -> float:
        counts = Counter(drawn)
        leading = [answer for answer, count in counts.items() if count == max(counts.values())]
        return (right in leading) / len(leading)

    def expected(vote: Callable[[tuple[str, ...], str], float], k: int) -> dict[str, float]:
        means = [
            fmean(vote(drawn, right) for drawn in combinations(problem, k))
            for problem, right in zip(answers["sampled"], ANSWERS, strict=True)
        ]
        return {"value": pytest.approx(fmean(means)), "error": pytest.approx(stdev(means) / len(means) ** 0.5)}

    sampled = scores["sampled"]
    assert sampled["pass_at"] == {str(k): expected(passes, k) for k in (1, 2, 4, 8)}
    assert sampled["maj_at"] == {"8": expected(majority, 8)}
    assert {"value": sampled["accuracy"], "error": sampled["accuracy_error"]} == sampled["pass_at"]["1"]


@pytest.mark.parametrize(
    ("damage", "needed"),
    [
        (lambda folder: None, False),
        (lambda folder: (folder / "model.safetensors").unlink(), True),
        (lambda folder: change_config(folder, quantization_config={"quant_method": "fp8"}), True),
    ],
)
def test_a_policy_is_built_where_engines_cannot_read_the_folder(
    damage: Callable[[Path], None], needed: bool, model: Path, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Such as one of FP8 on a CPU: an engine would start with random weights."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    damage(folder)
    command = evaluate_parser().parse_args([str(tiny_run.config), "--model", str(folder)])
    assert read_command(command).needs_policy == needed


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_mistakes_are_one_sentence(tiny_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([str(tiny_run.config), "data.eval={}", "--out", str(tmp_path / "out")])
    stderr = capfd.readouterr().err
    assert raised.value.code == 2
    assert "data.eval names no set: add one, as data.eval.NAME=FILE" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
