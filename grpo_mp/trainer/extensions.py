"""What the settings name by name or path, loaded once at the start of a run."""

from dataclasses import dataclass

from grpo_mp.algorithms.advantages import AdvantageEstimator, load_estimator
from grpo_mp.algorithms.group_filters import GroupFilter
from grpo_mp.algorithms.losses import load_policy_loss
from grpo_mp.algorithms.policy_losses import PolicyLoss
from grpo_mp.batching.group_filters import load_group_filter
from grpo_mp.config import Settings
from grpo_mp.monitor.loggers import MakeLogger, load_loggers


@dataclass(frozen=True)
class Extensions:
    """The parts of a run that users may replace, beside model family, data and rewards."""

    policy_loss: PolicyLoss
    estimator: AdvantageEstimator
    group_filter: GroupFilter
    make_loggers: tuple[MakeLogger, ...]


def load_extensions(settings: Settings) -> Extensions:
    """Load the parts that the settings name. Raises UserError where one cannot be loaded or called."""
    algorithm = settings.algorithm
    return Extensions(
        load_policy_loss(algorithm),
        load_estimator(algorithm.advantage),
        load_group_filter(algorithm.filter),
        load_loggers(settings.monitor.loggers),
    )
