"""What is measured of a critic in a layout, as in measures.py."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.algorithms.values import make_value_loss
from grpo_mp.batching.values import with_generalized_advantages, with_values
from grpo_mp.config import CriticConfig
from grpo_mp.models.value_head import VALUE_HEAD
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.metrics import reduce_value_losses
from tests.parallel.inputs import CLIPRANGE_VALUE, SAVED_AFTER, fixed_head, with_fixed_returns
from tests.parallel.measures import Bench, Result, _at, _copy, _gradients, _joined, _save, _updated


def critic(bench: Bench) -> Result:
    """Values and gradient of a critic that keeps its weights, and sums of the advantages of its values.

    Then the weights of another after each update of the step.
    """
    parallel = bench.parallel
    loss = make_value_loss(CLIPRANGE_VALUE)
    still = make_critic(bench, {"use_distributed_optimizer": False})
    updates = [[with_fixed_returns(batch) for batch in update] for update in bench.updates]
    values = still.values(updates[0])
    losses = still.compute_gradients(updates[0], loss)
    sums = reduce_value_losses(UpdateReport(losses, 0.0, 0.0, skipped=False), parallel)
    shards = _gradients(still)
    learning = make_critic(bench)
    weights = []
    reports = []
    for number, batches in enumerate(updates, start=1):
        reports.append(learning.update(batches, loss))
        weights.append(_copy(learning.tensors))
        if number == SAVED_AFTER and bench.case.saves:
            _save(bench, learning)
    batches = bench.updates[0] if values else []
    rows = [_at(batch, batch.mask.bool(), value=out) for batch, out in zip(batches, values, strict=True)]
    return _updated(learning, weights, reports) | {
        "shards": shards,
        "sums": sums,
        "values": _joined(rows),
        "advantages": _advantage_sums(bench, values),
    }


def _advantage_sums(bench: Bench, values: list[Tensor]) -> list[float]:
    """Sums over all tokens of the first update of advantages and returns, each times a number of its token."""
    batches = with_values(bench.updates[0], values)
    algorithm = AlgorithmConfig.model_validate(PRESETS["ppo"].settings["algorithm"] | {"gamma": 0.9, "lam": 0.8})
    (batches,) = with_generalized_advantages([batches], algorithm, 0.3, bench.parallel)
    sums = torch.zeros(2, dtype=torch.float64)
    if bench.parallel.is_reporting_rank:
        for batch in batches:
            assert batch.returns is not None
            sums += torch.stack([(torch.cos(batch.targets) * v).sum() for v in (batch.advantages, batch.returns)])
    dist.all_reduce(sums, group=bench.parallel.cpu_group)
    return list(sums.tolist())


def critic_resumed(bench: Bench) -> Result:
    """A critic's weights as another layout saved them before the last update, and after the last update."""
    resumed = make_critic(bench)
    load_policy(resumed, bench.checkpoints / bench.case.loads)
    weights = [_copy(resumed.tensors)]
    batches = [with_fixed_returns(batch) for batch in bench.updates[SAVED_AFTER]]
    report = resumed.update(batches, make_value_loss(CLIPRANGE_VALUE))
    return _updated(resumed, [*weights, _copy(resumed.tensors)], [report])


def make_critic(bench: Bench, megatron_args: Mapping[str, Any] | None = None) -> Critic:
    """A critic whose head is set, since that of a policy's folder is zero."""
    training = bench.settings.training
    training = training.model_copy(update={"megatron_args": training.megatron_args | dict(megatron_args or {})})
    changes = {"critic": CriticConfig(lr=bench.settings.optimizer.lr), "training": training}
    critic = Critic(bench.settings.model_copy(update=changes).for_critic(), bench.parallel)
    for name, tensor in critic.tensors.items():
        if name == VALUE_HEAD:
            with torch.no_grad():
                assert not tensor.any()
                tensor.copy_(fixed_head(tensor.shape[1]))
    return critic


CRITIC_MEASURES: dict[str, Callable[[Bench], Result]] = {
    measure.__name__: measure for measure in (critic, critic_resumed)
}
