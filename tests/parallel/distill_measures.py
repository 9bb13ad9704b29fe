"""What is measured of logprobs of several tokens of a position in a layout: a teacher's top k, truncated sampling."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from grpo_mp.algorithms.loss_metrics import compute_metrics
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.step_batch import assemble_step_batch
from grpo_mp.distributed.process_groups import sum_over_context
from grpo_mp.policy.trained_model import UpdateReport
from grpo_mp.trainer.logprobs import compute_logprobs
from grpo_mp.trainer.metrics import reduce_report
from grpo_mp.utils.types import NO_TOKEN, KeptTokens, MicroBatch, Sample, TopLogprobs
from tests.algorithms.objective import loss_of
from tests.assembly import assembly_of
from tests.parallel.cases import SMALL
from tests.parallel.measures import Bench, Result, _at, _gradients, _groups, _held, _joined

TOPK = 5
COEF = 0.7
SERVED = tuple(-0.25 * number for number in range(40))  # logprobs that another teacher gives a sample
DISTILLATION = {"teacher": {"path": "http://localhost:1"}, "coef": COEF, "topk": TOPK, "kl_type": "mixed"}


def teacher_topk(sample: Sample, vocabulary: int) -> TopLogprobs:
    """The top k of a random teacher; the policy does not have the last token of every third place."""
    generator = np.random.default_rng((sample.group_id, sample.index))
    logits = 3 * generator.standard_normal((len(sample.tokens), vocabulary))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = logits.argsort(1)[:, : -TOPK - 1 : -1].astype(np.int32)
    logprobs = np.take_along_axis(logprobs, ids, 1).astype(np.float32)
    ids[::3, -1] = NO_TOKEN
    return TopLogprobs(ids, logprobs)


def kept_tokens(sample: Sample, vocabulary: int) -> KeptTokens:
    """Random tokens beside the sampled one, from none to half of the vocabulary; every fifth position keeps all."""
    generator = np.random.default_rng((sample.group_id, sample.index, 7))

    def kept(position: int, token: int) -> list[int]:
        others = generator.permutation(vocabulary)[: generator.integers(vocabulary // 2)]
        return [] if position % 5 == 4 else [*(others[others != token]).tolist(), token]

    return KeptTokens.of([kept(position, token) for position, token in enumerate(sample.tokens)])


def distilled(bench: Bench) -> Result:
    """Gradient, loss and metrics of one update, by the teacher alone, through all between groups and loss."""
    vocabulary = bench.policy.hf.int("vocab_size")
    samples = [replace(one, teacher_topk=teacher_topk(one, vocabulary)) for one in bench.given.samples]
    return _one_update(bench, samples, {"distillation": DISTILLATION})


def truncated(bench: Bench) -> Result:
    """As `distilled`, the first of two passes by GRPO with an entropy bonus, over the kept tokens."""
    vocabulary = bench.policy.hf.int("vocab_size")
    samples = [replace(one, kept=kept_tokens(one, vocabulary)) for one in bench.given.samples]
    return _one_update(bench, samples, {"entropy": {"coef": COEF}}, epochs=2)


def teacher_prompt(sample: Sample, vocabulary: int) -> tuple[int, ...]:
    """What the policy sees as its own teacher: up to 30 random tokens; every third sample has no teacher."""
    generator = np.random.default_rng((sample.group_id, sample.index, 11))
    number = 4 * sample.group_id + sample.index
    return () if number % 3 == 1 else tuple(generator.integers(1, vocabulary, generator.integers(1, 30)).tolist())


def self_taught(bench: Bench) -> Result:
    """The teacher's logprob of each token, and the advantage."""
    vocabulary = bench.policy.hf.int("vocab_size")
    samples = [replace(one, teacher_prompt=teacher_prompt(one, vocabulary)) for one in bench.given.samples]
    samples[1] = replace(samples[1], teacher_logprobs=SERVED[: len(samples[1].tokens)])
    batches = _prepared(bench, samples, {"distillation": {"teacher": "self:column", "coef": COEF}})
    taught = [batch for batch in batches if batch.old_logprobs is not None]  # on a pipeline's last stage
    return _joined(
        [_at(one, one.mask.bool(), teacher=one.teacher_logprobs, advantage=one.advantages) for one in taught]
    )


def _one_update(bench: Bench, samples: Sequence[Sample], parts: dict[str, Any], epochs: int = 1) -> Result:
    policy = bench.policy
    parallel = bench.parallel
    algorithm = AlgorithmConfig.model_validate(parts)
    update = _prepared(bench, samples, parts, epochs)
    losses = policy.compute_gradients(update, loss_of(algorithm, reduce=partial(sum_over_context, parallel=parallel)))
    return {
        "shards": _gradients(policy),
        "held": _held(policy),
        "metrics": compute_metrics(reduce_report(UpdateReport(losses, 0.0, 0.0, skipped=False), parallel)),
    }


def _prepared(bench: Bench, samples: Sequence[Sample], parts: dict[str, Any], epochs: int = 1) -> list[MicroBatch]:
    """The micro-batches of one update, with all that its loss needs."""
    parallel = bench.parallel
    groups = _groups(bench, [samples[i] for i in bench.given.first_update])
    infos = all_gather_sample_info(groups, parallel.cpu_group)
    algorithm = AlgorithmConfig.model_validate(parts)
    training = bench.settings.training.model_copy(update={"updates_per_step": 1, "epochs": epochs})
    settings = bench.settings.model_copy(update={"algorithm": algorithm, "training": training})
    assembly = assembly_of(settings, parallel, SMALL["hidden_size"])
    batch = assemble_step_batch(groups, infos, 1, assembly)
    (update,) = compute_logprobs(bench.policy, batch, algorithm, training, adaptive_coefs={})
    return update


DISTILL_MEASURES: dict[str, Callable[[Bench], Result]] = {
    "distilled": distilled,
    "truncated": truncated,
    "self_taught": self_taught,
}
