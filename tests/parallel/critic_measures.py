"""What is measured of a critic in a layout, as in measures.py."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mp.algorithms.advantages import load_estimator
from grpo_mp.algorithms.presets import PRESETS
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.algorithms.values import make_value_loss
from grpo_mp.batching.critic_layout import critic_updates, values_on_policy
from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.step_batch import PackingSpec, StepBatch, assemble_step_batch
from grpo_mp.batching.values import with_generalized_advantages, with_values
from grpo_mp.config import CriticConfig, Settings
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.process_groups import Parallel, replica_groups
from grpo_mp.models.value_head import VALUE_HEAD
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.critic_metrics import reduce_value_losses
from grpo_mp.trainer.job import make_critic_parallel
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.utils.types import MicroBatch
from tests.parallel.cases import LAYOUTS, SMALL
from tests.parallel.inputs import CLIPRANGE_VALUE, fixed_head, with_fixed_returns
from tests.parallel.measures import Bench, Result, _at, _copy, _gradients, _groups, _joined, _save, _updated


def critic(bench: Bench) -> Result:
    """Values and gradient of a critic that keeps its weights, and sums of the advantages of its values.

    Then the weights of another after each update of the step.
    """
    parallel, loss = bench.parallel, make_value_loss(CLIPRANGE_VALUE)
    still = make_critic(bench, {"use_distributed_optimizer": False})
    updates = [[with_fixed_returns(batch) for batch in update] for update in bench.updates]
    values = still.values(updates[0])
    losses = still.compute_gradients(updates[0], loss)
    sums = reduce_value_losses(UpdateReport(losses, 0.0, 0.0, skipped=False), parallel)
    shards = _gradients(still)
    learning, weights, reports = make_critic(bench), [], []
    for number, batches in enumerate(updates, start=1):
        reports.append(learning.update(batches, loss))
        weights.append(_copy(learning.tensors))
        if number == 2 and bench.case.saves:
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
    return _sums_with(bench, with_values(bench.updates[0], values))


def _sums_with(bench: Bench, batches: list[MicroBatch]) -> list[float]:
    algorithm = AlgorithmConfig.model_validate(PRESETS["ppo"].settings["algorithm"] | {"gamma": 0.9, "lam": 0.8})
    (batches,) = with_generalized_advantages([batches], algorithm, 0.3, bench.parallel)
    sums = torch.zeros(2, dtype=torch.float64)
    if bench.parallel.is_reporting_rank:
        for batch in batches:
            assert batch.returns is not None
            sums += torch.stack([(torch.cos(batch.targets) * v).sum() for v in (batch.advantages, batch.returns)])
    dist.all_reduce(sums, group=bench.parallel.cpu_group)
    return list(sums.tolist())


def critic_beside(bench: Bench) -> Result:
    """As `critic`, of one in a layout of its own; is a policy beside it as if it were not there?

    Values are those that arrive in the policy's micro-batches, returns are set there.
    """
    parallel, loss, (model, layout) = bench.parallel, make_value_loss(CLIPRANGE_VALUE), bench.case.beside
    section = CriticConfig(
        path=bench.settings.model.path.parent / model,
        layout=LayoutConfig(**LAYOUTS[layout][1]),
        lr=bench.settings.optimizer.lr,
    )
    settings = bench.settings.model_copy(update={"critic": section})
    before, groups = bench.policy.logprobs(bench.updates[0]), replica_groups(parallel)
    beside = make_critic_parallel(settings, parallel, 60.0)
    still, learning = (make_critic(bench, args, section, beside) for args in ({"use_distributed_optimizer": False}, {}))
    batch = _assembled(bench, settings, still)
    assert batch.critic
    values = [still.values(update) for update in batch.critic.updates]
    with_own = values_on_policy(batch, bench.updates, values, beside, parallel)
    fixed = [[with_fixed_returns(one) for one in update] for update in with_own]
    updates = critic_updates(batch, fixed, beside, parallel)
    losses = still.compute_gradients(updates[0], loss)
    sums = reduce_value_losses(UpdateReport(losses, 0.0, 0.0, skipped=False), beside)
    shards, weights, reports = _gradients(still), [], []
    for number, batches in enumerate(updates, start=1):
        reports.append(learning.update(batches, loss))
        weights.append(_copy(learning.tensors))
        check_replicas(learning, number)
        if number == 2 and bench.case.saves:
            _save(bench, learning)
    rows = [_at(one, one.mask.bool(), value=one.values) for one in with_own[0] if one.values is not None]
    after = bench.policy.logprobs(bench.updates[0])
    return _updated(learning, weights, reports) | {
        "shards": shards,
        "sums": sums,
        "values": _joined(rows),
        "advantages": _sums_with(bench, with_own[0]),
        "policy": [torch.equal(one, other) for one, other in zip(before, after, strict=True)],
        "groups": replica_groups(parallel) == groups != replica_groups(beside),
    }


def _assembled(bench: Bench, settings: Settings, critic: Critic) -> StepBatch:
    """The step's samples, brought to both models' ranks."""
    groups, parallel = _groups(bench, bench.given.samples), bench.parallel
    infos = all_gather_sample_info(groups, parallel.cpu_group)
    estimator = load_estimator(settings.algorithm.advantage)
    packing = PackingSpec(settings.for_critic(), critic.parallel, critic.config.hidden_size)
    width = SMALL["hidden_size"]
    return assemble_step_batch(groups, infos, {}, settings, parallel, width, 1, estimator, critic=packing)


def critic_resumed(bench: Bench) -> Result:
    """A critic's weights as another layout saved them after its second update, and after the third."""
    resumed = make_critic(bench)
    load_policy(resumed, bench.checkpoints / bench.case.loads)
    weights = [_copy(resumed.tensors)]
    batches = [with_fixed_returns(batch) for batch in bench.updates[2]]
    report = resumed.update(batches, make_value_loss(CLIPRANGE_VALUE))
    return _updated(resumed, [*weights, _copy(resumed.tensors)], [report])


def make_critic(
    bench: Bench,
    megatron_args: Mapping[str, Any] | None = None,
    section: CriticConfig | None = None,
    parallel: Parallel | None = None,
) -> Critic:
    """A critic whose head is set, since that of a policy's folder is zero; by default in the policy's layout."""
    training = bench.settings.training
    training = training.model_copy(update={"megatron_args": training.megatron_args | dict(megatron_args or {})})
    changes = {"critic": section or CriticConfig(lr=bench.settings.optimizer.lr), "training": training}
    critic = Critic(bench.settings.model_copy(update=changes), parallel or bench.parallel)
    for name, tensor in critic.tensors.items():
        if name == VALUE_HEAD:
            with torch.no_grad():
                assert not tensor.any()
                tensor.copy_(fixed_head(tensor.shape[1]))
    return critic


CRITIC_MEASURES: dict[str, Callable[[Bench], Result]] = {
    measure.__name__: measure for measure in (critic, critic_beside, critic_resumed)
}
