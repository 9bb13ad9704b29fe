"""The divergence of a policy from a teacher of which the k most likely tokens are known."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.utils.types import MicroBatch

LEAST_REST = 1e-7  # a rest of the teacher's probability below it is rounding error of its float32 logprobs


@dataclass(frozen=True)
class TopkTerms:
    """Of every token, [T] in float64: the divergence, with a gradient, and how much of either is in the k tokens."""

    divergence: Tensor
    teacher_mass: Tensor
    policy_mass: Tensor


def topk_terms(batch: MicroBatch, distillation: DistillationConfig) -> TopkTerms | None:
    """Compute the divergence in the place of each token from the policy's and the teacher's logprobs of k tokens.

    Both distributions are taken over k + 1 buckets: the teacher's k most likely tokens, and all others together. That
    is a function of the token, so by the data processing inequality (Cover and Thomas, Elements of Information Theory,
    2006, section 2.8, and the log sum inequality, theorem 2.7.1) neither divergence is above that of the whole
    vocabularies; it is 0 where the buckets agree, and no probability is renormalized. With p the policy, q the teacher:

    reverse: sum p log(p / q), forward: sum q log(q / p), mixed: w x forward + (1 - w) x reverse (NeMo-RL kl_type,
    mixed_kl_weight). None where no teacher scored the micro-batch.
    """
    ids, teacher, policy = batch.teacher_topk_ids, batch.teacher_topk_logprobs, batch.topk_logprobs
    if ids is None or teacher is None or policy is None:
        return None
    known, learned = ids >= 0, batch.mask.bool()[:, None]
    log_p = policy.t().double().where(learned, 0.0)
    mass = teacher.double().exp().where(known, 0.0).sum(1)
    rest = torch.log1p(-mass.clamp(max=1 - LEAST_REST))
    log_q = torch.cat([teacher.double(), rest[:, None]], 1)
    difference = (log_p - log_q).where(torch.cat([known, torch.ones_like(known[:, :1])], 1) & learned, 0.0)
    reverse, forward = (log_p.exp() * difference).sum(1), -(log_q.exp() * difference).sum(1)
    weight = {"reverse": 0.0, "forward": 1.0, "mixed": distillation.mixed_kl_weight}[distillation.kl_type]
    policy_mass = log_p.detach()[:, :-1].exp().where(known, 0.0).sum(1)
    return TopkTerms(weight * forward + (1 - weight) * reverse, mass, policy_mass)
