"""What the models of GRPO need beside what those of PPO would need, with the same model, layout and dtypes."""

from dataclasses import dataclass

from grpo_mp.planner.activations import activation_bytes, forward_bytes, logits_bytes
from grpo_mp.planner.plan import Plan


@dataclass(frozen=True)
class ModelMemory:
    """One model: bytes on the fullest device while it computes, and on the fullest host while it does not."""

    model: str
    trained: bool
    device: float
    host: float


def grpo_models(plan: Plan) -> tuple[ModelMemory, ...]:
    """Return the policy, and a reference where the settings measure a KL divergence."""
    policy = _trained_model(plan, "policy")
    return (policy, _frozen_model(plan, "reference")) if plan.job.has_reference else (policy,)


def ppo_models(plan: Plan) -> tuple[ModelMemory, ...]:
    """Return policy and critic, which are trained, and reference and reward model, of the same size and frozen."""
    return (
        _trained_model(plan, "policy"),
        _trained_model(plan, "critic"),
        _frozen_model(plan, "reference"),
        _frozen_model(plan, "reward model"),
    )


def _trained_model(plan: Plan, model: str) -> ModelMemory:
    """Count the policy, or a critic, which differs in its head: one column."""
    job, per_parameter = plan.job, plan.job.per_parameter
    device, host = 0.0, 0.0
    for stage, count in enumerate(job.parameter_counts):
        state = job.sharded_parameters(count) * per_parameter.optimizer
        logits = logits_bytes(job, stage, backward=True) if model == "policy" else 0.0
        weights = count.total * per_parameter.weights
        gradients = count.total * per_parameter.gradients
        device = max(device, weights + gradients + state + activation_bytes(job, stage) + logits)
        host = max(host, job.gpus_per_node * (weights + state))
    return ModelMemory(model, True, device, host)


def _frozen_model(plan: Plan, model: str) -> ModelMemory:
    job, weight_bytes = plan.job, plan.job.per_parameter.weights
    counts = [count.total for count in job.parameter_counts]
    device = max(count * weight_bytes + forward_bytes(job, stage) for stage, count in enumerate(counts))
    return ModelMemory(model, False, device, job.gpus_per_node * max(counts) * weight_bytes)
