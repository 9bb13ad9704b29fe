"""Losses over several tokens of a position: one rank against formulas in transformers, layouts against one rank."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.parallel.cases import CASES, DISTILLED, Case, cases_with
from tests.parallel.conftest import Outcomes
from tests.parallel.distill_measures import COEF, SERVED, kept_tokens, teacher_prompt, teacher_topk
from tests.parallel.expected import Expected, _load, _logits, file_gradients
from tests.parallel.full_model import Tensors, exceeding, relative_errors
from tests.parallel.inputs import TEMPERATURE

BOUND = 1e-5


def written_out(expected: Expected) -> tuple[Tensors, dict[str, float]]:
    """The gradient of the mean over samples of the mean over tokens, bucket by bucket in float64; and the metrics."""
    model = _load(expected.folder)
    divergences = list[Tensor]()
    losses = list[Tensor]()
    masses = list[tuple[float, float]]()
    for sample in (expected.given.samples[i] for i in expected.given.first_update):
        logits = _logits(model, sample).double()[len(sample.prompt_tokens) - 1 : -1]
        topk = teacher_topk(sample, logits.shape[1])
        of_sample = []
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


def truncated_by_hand(expected: Expected) -> tuple[Tensors, dict[str, float]]:
    """The gradient of GRPO with an entropy bonus over the kept tokens in float64, where old and new policy agree."""
    model = _load(expected.folder)
    given = expected.given
    losses = list[Tensor]()
    entropies = list[Tensor]()
    outside = list[Tensor]()
    samples = [given.samples[i] for i in given.first_update]
    for sample in samples:
        logits = _logits(model, sample).double()[len(sample.prompt_tokens) - 1 : -1] / TEMPERATURE
        kept = kept_tokens(sample, logits.shape[1])
        rows = kept.padded(logits.shape[1]).tolist()
        mask = torch.tensor([[i in row or max(row) < 0 for i in range(logits.shape[1])] for row in rows])
        outside.append((logits.softmax(-1) * ~mask).sum(1))
        log_q = logits.masked_fill(~mask, -1e6).log_softmax(-1)
        entropies.append(-(log_q.exp() * log_q).sum(1))
        own = log_q.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        rewards = torch.tensor([one.reward for one in samples if one.group_id == sample.group_id], dtype=torch.float64)
        advantage = (sample.reward - rewards.mean()) / (rewards.std() + 1e-4)
        losses.append(-advantage * (own - own.detach()).exp().mean())
    entropy = torch.cat(entropies).mean()
    loss = torch.stack(losses).mean() - COEF * entropy
    loss.backward()
    return file_gradients(model) | expected.mtp_gradient, {
        "train/loss": float(loss.detach()),
        "train/ppo_kl": 0.0,
        "train/entropy": float(entropy.detach()),
        "mismatch/mass_outside_kept": float(torch.cat(outside).mean().detach()),
    }


MEASURED = {"distilled": written_out, "truncated": truncated_by_hand}
one_rank = pytest.mark.parametrize(
    "case", [CASES[f"{model}-one-distilled"] for model in DISTILLED], ids=lambda case: case.name
)


def gradient(case: Case, outcomes: Outcomes, measure: str) -> Tensors:
    return outcomes.family_gradient(case, "", measure)


@pytest.mark.parametrize("measure", MEASURED)
@one_rank
def test_loss_metrics_and_gradient_of_one_rank_are_those_written_out(
    case: Case, outcomes: Outcomes, measure: str
) -> None:
    expected, metrics = MEASURED[measure](outcomes.models[case.model].expected)
    (rank,) = outcomes.by_rank(case, measure)
    assert {name: rank["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=BOUND, abs=1e-6)
    assert not exceeding(relative_errors(gradient(case, outcomes, measure), expected), BOUND)


@pytest.mark.parametrize("measure", MEASURED)
@pytest.mark.parametrize("case", cases_with("distilled"), ids=lambda case: case.name)
def test_every_layout_is_as_one_rank(case: Case, outcomes: Outcomes, measure: str) -> None:
    one = CASES[f"{case.model}-one-distilled"]
    (of_one,) = outcomes.by_rank(one, measure)
    for rank in outcomes.by_rank(case, measure):
        assert rank["metrics"] == pytest.approx(of_one["metrics"], rel=1e-4, abs=1e-6)
    assert not exceeding(relative_errors(gradient(case, outcomes, measure), gradient(one, outcomes, measure)), BOUND)


@pytest.mark.parametrize("case", cases_with("self_taught"), ids=lambda case: case.name)
def test_the_policy_as_its_own_teacher_is_transformers_after_the_teachers_prompts(
    case: Case, outcomes: Outcomes
) -> None:
    """Old logprobs are those after the policy's own prompts; what has no teacher is not taught."""
    expected = outcomes.models[case.model].expected
    model = _load(expected.folder)
    tables = dict[int, tuple[Tensor, Tensor]]()
    for i in expected.given.first_update:
        sample = expected.given.samples[i]
        shown = teacher_prompt(sample, model.config.vocab_size)
        pair = []
        for prompt in (sample.prompt_tokens, shown or sample.prompt_tokens):
            with torch.no_grad():
                logits = _logits(model, replace(sample, prompt_tokens=prompt))[len(prompt) - 1 : -1]
            log_p = (logits.double() / TEMPERATURE).log_softmax(-1)
            pair.append(log_p.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0])
        served = torch.tensor(SERVED[: len(sample.tokens)]) if i == 1 else pair[1] * torch.nan
        tables[i] = (pair[0], pair[1] if shown else served)
    seen = 0
    differing = 0
    for rank in filter(None, outcomes.by_rank(case, "self_taught")):
        places = zip(*(rank[name].tolist() for name in ("sample", "position", "teacher", "advantage")), strict=True)
        for i, position, teacher, advantage in places:
            old, taught = (values[position - len(expected.given.samples[i].prompt_tokens) + 1] for values in tables[i])
            assert teacher == pytest.approx(float(taught), abs=BOUND, nan_ok=True)
            assert advantage == pytest.approx(float((COEF * (taught - old)).nan_to_num()), abs=BOUND)
            differing += abs(advantage) > 0.1
            seen += 1
    tokens = sum(len(expected.given.samples[i].tokens) for i in expected.given.first_update)
    assert seen == tokens * case.sizes.get("tensor", 1)
    assert differing > tokens / 3
