"""Parts by which a step's batch is assembled, from the settings of a run."""

from collections.abc import Sequence

from grpo_mp.algorithms.advantages import load_estimator
from grpo_mp.batching.step_batch import Assembly
from grpo_mp.batching.updates import StepRule, packing_rule
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import Parallel


def assembly_of(settings: Settings, parallel: Parallel, hidden_size: int, moe_layers: Sequence[int] = ()) -> Assembly:
    training = settings.training
    with_mtp = settings.model.trains_mtp
    packing = packing_rule(settings.layout, training, parallel.dp_size, hidden_size=hidden_size, with_mtp=with_mtp)
    rule = StepRule(packing, training, settings.run.seed)
    estimator = load_estimator(settings.algorithm.advantage)
    return Assembly(rule, settings.algorithm, settings.rollout, parallel, estimator, {}, moe_layers=moe_layers)
