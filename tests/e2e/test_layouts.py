"""The loop in layouts that the other runs of this folder do not have."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.conftest import TinyRun
from tests.e2e.conftest import REWARD, StartJob, run_well
from tests.e2e.jobs import read_jsonl
from tests.reward_models import expected_scores, make_reward_model

pytestmark = pytest.mark.slow
TIE = 1e-6


def mixture(folder: Path, train: Path, served: bool) -> str:
    """Three of four prompts are of one file, the others of another, each with terms of their own."""
    rows = [{"question": f"How many {number}?", "answer": str(number)} for number in range(20)]
    (folder / "others.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = ", model: 0.5" * served
    sums = f"sums: {{path: {train}, weight: 3, reward: {{letters: 1.0, answer: 2.0{model}}}}}"
    others = f"others: {{path: {folder / 'others.jsonl'}, reward: {{letters: -1.0, repetition: 0.1}}}}"
    return f"data.train={{{sums}, {others}}}"


def check_mixture(run: Path, train: Path, served: float) -> None:
    questions = {row["question"] for row in read_jsonl(train)}
    for file in sorted(run.glob("samples/step_*.jsonl")):
        rows = read_jsonl(file)
        assert len({row["prompt"] for row in rows if row["prompt"] in questions}) == 3
        for row in rows:
            terms = row["terms"]
            score = terms.pop("model", 0.0)
            if row["prompt"] in questions:
                assert terms.keys() == {"letters", "answer"}
                assert row["reward"] == pytest.approx(terms["letters"] + 2 * terms["answer"] + served * score)
            else:
                assert row["prompt"].startswith("How many ")
                assert terms.keys() == {"letters", "repetition"}
                assert row["reward"] == pytest.approx(0.1 * terms["repetition"] - terms["letters"])


def check_served_scores(run: Path, model: Path) -> None:
    """Both servers score the groups of the one engine, in SCORE, as transformers does."""
    files = [parquet.read_table(file) for file in sorted(run.glob("rollouts_dump/step_*/rank_*.parquet"))]
    rows = [row for table in files for row in table.to_pylist()]
    assert len(rows) == 2 * 4 * 4
    rows = [row for row in rows if "model" in dict(row["reward_terms"])]  # of the set whose reward names it
    scores = [dict(row["reward_terms"])["model"] for row in rows]
    assert len(rows) == 2 * 3 * 4
    assert scores == pytest.approx(
        expected_scores(model, [[*row["prompt_tokens"], *row["tokens"]] for row in rows]), abs=1e-4
    )
    assert len(set(scores)) > len(scores) / 2
    logs = [run / "logs" / f"reward_model_{index}.log" for index in (0, 1)]
    assert all("Prefill batch" in log.read_text() for log in logs)


@torch.no_grad()
def wrong_logprobs(run: Path, model: Path) -> list[str]:
    """The tokens whose logprobs by the engine are not those of transformers with the weights that drew them.

    Not looked at is what comes after a tie of experts or of their groups, which either side may break as it likes.
    """
    found = []
    compared = 0
    count = 0
    for step, folder in ((1, model), (2, run / "exports" / "step_000001")):
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        margins = []
        for module in reference.modules():
            if type(module).__name__ == "DeepseekV3TopkRouter":
                module.register_forward_hook(
                    lambda router, given, _, seen=margins: seen.append(margin(router, given[0]))
                )
        for row in parquet.read_table(run / "rollouts_dump" / f"step_{step:06d}" / "rank_0.parquet").to_pylist():
            margins.clear()
            tokens = torch.tensor([[*row["prompt_tokens"], *row["tokens"]]])
            first = len(row["prompt_tokens"]) - 1
            table = reference(tokens).logits[0].log_softmax(-1)[first:-1]
            expected = table.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0]
            no_tie = (smallest(margins).cummin(0).values > TIE)[first:-1]
            wrong = ((torch.tensor(row["rollout_logprobs"]) - expected).abs() > 1e-3) & no_tie
            found += [
                f"step {step}, group {row['group_id']}: token {place}" for place in wrong.nonzero()[:, 0].tolist()
            ]
            compared = compared + int(no_tie.sum())
            count = count + len(row["tokens"])
    assert compared > 0.9 * count
    return found


@pytest.mark.parametrize(
    ("parallel", "engine"),
    [("tensor", ()), pytest.param("expert", ("engine.args.ep_size=2",), marks=pytest.mark.nightly)],
    ids=["tensor", "expert"],
)
def test_both_ranks_are_one_policy_and_one_engine(
    parallel: str, engine: tuple[str, ...], start_job: StartJob, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Prompts are shared and of two sets."""
    (tmp_path / "reward.py").write_text(REWARD)
    rewards = [f"reward.functions={{{tmp_path / 'reward.py'}:letters: 1.0}}"]
    run = tmp_path / "run"
    served = parallel == "tensor"
    if served:
        make_reward_model(tmp_path / "reward_model", tiny_run.model)
        rewards.append(f"reward.model={{path: {tmp_path / 'reward_model'}, weight: 0.5}}")
    layout = (f"layout={{{parallel}: 2}}", "engine.gpus_per_engine=2", *engine)
    training = ("training.share_prompts=true", "training.router_replay=R3")  # ties are broken as the engine did
    brief = ("data.eval={}", "run.steps=2", "run.export=false", "run.export_every=1", "rollout.dump=true")
    data = mixture(tmp_path, tiny_run.train, served)
    run_well(start_job(f"run.folder={run}", data, *rewards, *layout, *training, *brief))
    steps = read_jsonl(run / "metrics.jsonl")
    assert all(step["train/grad_norm"] > 0 for step in steps[1:])
    assert all(step["sync/check/logprob_abs_diff/mean"] <= 1e-4 for step in steps)
    assert wrong_logprobs(run, tiny_run.model) == []
    mismatches = [step["mismatch/logprob_abs_diff/mean"] for step in steps[1:]]
    assert max(mismatches) <= 1e-4, mismatches
    check_mixture(run, tiny_run.train, 0.5 * served)
    if served:
        check_served_scores(run, tmp_path / "reward_model")
    if parallel == "expert":  # every shard is where the engine needs it
        assert all(step["sync/bytes_sent"] == 0 for step in steps)


def margin(router: Any, hidden: Tensor) -> Tensor:
    """[T]: the gap between the worst chosen and the best refused, of groups and of experts in the chosen groups."""
    logits = hidden.view(-1, router.hidden_dim) @ router.weight.t()
    scores = logits.sigmoid() + router.e_score_correction_bias
    grouped = scores.view(len(scores), router.num_group, -1)
    groups = grouped.topk(2, dim=-1).values.sum(-1)
    kept = groups.topk(router.topk_group, dim=-1).indices
    inside = torch.full_like(groups, -torch.inf).scatter(1, kept, 0.0)[..., None] + grouped
    return smallest([gap(groups, router.topk_group), gap(inside.flatten(1), router.top_k)])


def gap(scores: Tensor, chosen: int) -> Tensor:
    """[T]: between the last chosen and the first refused; infinite where none is refused."""
    ordered = scores.sort(descending=True).values
    refused = ordered[:, chosen] if chosen < ordered.shape[1] else torch.full_like(ordered[:, 0], -torch.inf)
    return ordered[:, chosen - 1] - refused


def smallest(several: Iterable[Tensor]) -> Tensor:
    """Return the elementwise minimum."""
    return torch.stack(list(several)).amin(0)
