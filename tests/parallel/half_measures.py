"""What is measured of a policy in float16 in a layout, as in measures.py."""

from collections.abc import Callable

import torch

from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.policy import Policy
from tests.algorithms.objective import loss_of
from tests.parallel.inputs import SAVED_AFTER
from tests.parallel.measures import Bench, Result, _copy, _save, _updated


def half(bench: Bench) -> Result:
    """Weights after every update of the step, of which the first is made a second time.

    At the first try the gradient of the last expert overflows on the rank that holds it.
    """
    policy = half_policy(bench)
    loss = loss_of(bench.settings.algorithm)
    expert = max((name for name in policy.tensors if ".experts." in name), key=_number)
    overflow = policy.tensors[expert].register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    last = all(_number(expert) >= _number(name) for name in policy.params if ".experts." in name)
    if not last:
        overflow.remove()
    reports = [policy.update(bench.updates[0], loss)]
    overflow.remove()
    weights = [_copy(policy.tensors)]
    for number, batches in enumerate(bench.updates, start=1):
        reports.append(policy.update(batches, loss))
        weights.append(_copy(policy.tensors))
        if number == SAVED_AFTER and bench.case.saves:
            _save(bench, policy)
    return _updated(policy, weights, reports[1:]) | {
        "overflowed": [report.skipped for report in reports],
        "scales": [report.measured["train/loss_scale"] for report in reports],
    }


def half_resumed(bench: Bench) -> Result:
    """Weights as another layout saved them before the last update, and after the last update."""
    policy = half_policy(bench)
    load_policy(policy, bench.checkpoints / bench.case.loads)
    weights = [_copy(policy.tensors)]
    report = policy.update(bench.updates[SAVED_AFTER], loss_of(bench.settings.algorithm))
    return _updated(policy, [*weights, _copy(policy.tensors)], [report]) | {
        "scales": [report.measured["train/loss_scale"]]
    }


def half_policy(bench: Bench) -> Policy:
    model = bench.settings.model.model_copy(update={"dtype": "float16"})
    return Policy(bench.settings.model_copy(update={"model": model}), bench.parallel, with_reference=False)


def _number(name: str) -> tuple[int, int]:
    """The layer and the expert of a parameter of experts, such as decoder.layers.1.mlp.experts.linear_fc1.weight7."""
    digits = [part for part in name.replace("weight", ".").split(".") if part.isdigit()]
    return int(digits[0]), int(digits[-1])


HALF_MEASURES: dict[str, Callable[[Bench], Result]] = {measure.__name__: measure for measure in (half, half_resumed)}
