"""The loss over a teacher's top k: one rank against the formula in transformers, every layout against one rank."""

import pytest
import torch
from torch import Tensor

from tests.parallel.cases import CASES, DISTILLED, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.distill_measures import COEF, teacher_topk
from tests.parallel.expected import Expected, _load, _logits, file_gradients
from tests.parallel.full_model import Tensors, exceeding, relative_errors
from tests.parallel.inputs import TEMPERATURE

BOUND = 1e-5


def written_out(expected: Expected) -> tuple[Tensors, dict[str, float]]:
    """The gradient of the mean over samples of the mean over tokens, bucket by bucket in float64; and the metrics."""
    model = _load(expected.folder)
    divergences, losses, masses = list[Tensor](), list[Tensor](), list[tuple[float, float]]()
    for sample in (expected.given.samples[i] for i in expected.given.first_update):
        logits = _logits(model, sample).double()[len(sample.prompt_tokens) - 1 : -1]
        topk, of_sample = teacher_topk(sample, logits.shape[1]), []
        for p, ids, logprobs in zip((logits / TEMPERATURE).softmax(-1), topk.ids, topk.logprobs, strict=True):
            pairs = [(p[i], float(logprob)) for i, logprob in zip(ids.tolist(), logprobs, strict=True) if i >= 0]
            buckets = [(own, torch.tensor(teacher, dtype=torch.float64).exp()) for own, teacher in pairs]
            known = [torch.stack(values).sum() for values in zip(*buckets, strict=True)]
            masses.append((float(known[1]), float(known[0].detach())))
            buckets.append((1 - known[0], 1 - known[1]))
            reverse = torch.stack([own * (own / teacher).log() for own, teacher in buckets]).sum()
            forward = torch.stack([teacher * (teacher / own).log() for own, teacher in buckets]).sum()
            of_sample.append((forward + reverse) / 2)
        divergences += of_sample
        losses.append(torch.stack(of_sample).mean())
    loss = COEF * torch.stack(losses).mean()
    loss.backward()
    teacher, student = (sum(values) / len(masses) for values in zip(*masses, strict=True))
    found = torch.stack(divergences).detach()
    return file_gradients(model) | expected.mtp_gradient, {
        "train/loss": float(loss.detach()),
        "train/pg_loss": 0.0,
        "distill/kl/mean": float(found.mean()),
        "distill/kl/max": float(found.max()),
        "distill/teacher_mass": teacher,
        "distill/student_mass": student,
    }


def gradient(case: Case, outcomes: Outcomes) -> Tensors:
    return outcomes.family_gradient(case, "", "distilled")


@pytest.mark.parametrize("case", [CASES[f"{model}-one-distilled"] for model in DISTILLED], ids=lambda case: case.name)
def test_loss_metrics_and_gradient_of_one_rank_are_those_written_out(case: Case, outcomes: Outcomes) -> None:
    expected, metrics = written_out(outcomes.models[case.model].expected)
    (rank,) = outcomes.by_rank(case, "distilled")
    assert {name: rank["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=BOUND)
    assert not exceeding(relative_errors(gradient(case, outcomes), expected), BOUND)


@pytest.mark.parametrize("case", cases_with("distilled"), ids=lambda case: case.name)
def test_every_layout_is_as_one_rank(case: Case, outcomes: Outcomes) -> None:
    one = CASES[f"{case.model}-one-distilled"]
    (of_one,) = outcomes.by_rank(one, "distilled")
    for rank in outcomes.by_rank(case, "distilled"):
        assert rank["metrics"] == pytest.approx(of_one["metrics"], rel=1e-4, abs=1e-6)
    assert not exceeding(relative_errors(gradient(case, outcomes), gradient(one, outcomes)), BOUND)
