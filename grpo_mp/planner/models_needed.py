"""What GRPO needs beside what PPO would need with the same model, layout and keeping."""

from dataclasses import dataclass

from grpo_mp.planner.activations import activation_bytes, forward_bytes, logits_bytes
from grpo_mp.planner.bytes_per_parameter import bytes_per_parameter
from grpo_mp.planner.plan import Plan


@dataclass(frozen=True)
class Need:
    """One model: bytes on the fullest device while it computes, and on the fullest host while it does not."""

    model: str
    trained: bool
    device: float
    host: float


def grpo_models(plan: Plan) -> tuple[Need, ...]:
    """The policy, and a reference where the settings measure a KL divergence."""
    policy = _trained(plan, "policy")
    return (policy, _frozen(plan, "reference")) if plan.job.has_reference else (policy,)


def ppo_models(plan: Plan) -> tuple[Need, ...]:
    """The critic is trained as the policy is; reference and reward model, of the same size, are frozen."""
    return (
        _trained(plan, "policy"),
        _trained(plan, "critic"),
        _frozen(plan, "reference"),
        _frozen(plan, "reward model"),
    )


def _trained(plan: Plan, model: str) -> Need:
    """The critic's head has one column; everything else is the policy's."""
    job, kept = plan.job, bytes_per_parameter(plan.job.settings)
    device, host = 0.0, 0.0
    for stage, count in enumerate(job.counts):
        state = (count.dense / job.dense_shards + count.expert / job.expert_shards) * kept.optimizer
        logits = logits_bytes(job, stage, backward=True) if model == "policy" else 0.0
        held = count.total * (kept.weights + kept.gradients) + state
        device = max(device, held + activation_bytes(job, stage) + logits)
        host = max(host, job.gpus_per_node * (count.total * kept.weights + state))
    return Need(model, True, device, host)


def _frozen(plan: Plan, model: str) -> Need:
    job, kept = plan.job, bytes_per_parameter(plan.job.settings)
    device = max(count.total * kept.weights + forward_bytes(job, stage) for stage, count in enumerate(job.counts))
    return Need(model, False, device, job.gpus_per_node * max(count.total for count in job.counts) * kept.weights)
