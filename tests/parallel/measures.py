"""What is measured in a layout. Each function runs on every rank and returns this rank's part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from grpo_mp import platform
from grpo_mp.algorithms.loss_metrics import compute_metrics
from grpo_mp.algorithms.losses import token_mean_loss
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.exchange import all_gather_sample_info
from grpo_mp.batching.routed_experts import exchange_routed_experts
from grpo_mp.batching.step_batch import assemble_step_batch
from grpo_mp.checkpoint.compare import compare_weights
from grpo_mp.checkpoint.convert import to_hf, to_megatron
from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.config import Settings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.process_groups import Parallel, all_gather, sum_over_context
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.shared_prompt_attention import packed_sequences
from grpo_mp.policy.trained_model import TrainedModel, UpdateReport
from grpo_mp.trainer.engine_check import sequence_logprobs
from grpo_mp.trainer.logprobs import compute_logprobs
from grpo_mp.trainer.metrics import mtp_metrics, reduce_report
from grpo_mp.trainer.replica_check import check_replicas
from grpo_mp.trainer.sft_step import pack_samples, reduce_sums
from grpo_mp.utils.errors import EarlyStopError
from grpo_mp.utils.types import MicroBatch, Prompt, ReplayedChoices, Sample, SampleGroup
from tests.algorithms.objective import loss_of
from tests.assembly import assembly_of
from tests.parallel.cases import SMALL, Case
from tests.parallel.chats import CHATS, chat_set
from tests.parallel.inputs import FAMILY, SAVED_AFTER, StepSamples, plan_step, step_microbatches, with_choices
from tests.parallel.remembered import Remembered
from tests.policy.by_megatron import copies, load_by_megatron, unequal
from tests.save_policy import save_policy

Result = dict[str, Any]


@dataclass
class Bench:
    """One case on this rank. `checkpoints`: the folder of what cases save."""

    case: Case
    settings: Settings
    parallel: Parallel
    given: StepSamples
    checkpoints: Path

    @cached_property
    def policy(self) -> Policy:
        """A policy that keeps its weights. Without the distributed optimizer gradients are whole on every rank."""
        return self._policy(with_reference=False)

    @cached_property
    def policy_with_reference(self) -> Policy:
        """The reference has all weights a little larger."""
        policy = self._policy(with_reference=True)
        assert policy.reference
        with torch.no_grad():
            for tensor in policy.tensors.values():
                tensor.mul_(1.02)
            policy.reference.update(1.0)
            for tensor in policy.tensors.values():
                tensor.div_(1.02)
        return policy

    def _policy(self, with_reference: bool) -> Policy:
        whole = self.settings.training.megatron_args | {"use_distributed_optimizer": False}
        training = self.settings.training.model_copy(update={"megatron_args": whole})
        settings = self.settings.model_copy(update={"training": training})
        return Policy(settings, self.parallel, with_reference)

    @cached_property
    def updates(self) -> list[list[MicroBatch]]:
        return step_microbatches(self.given, self.settings, self.parallel)

    @cached_property
    def initial_logprobs(self) -> list[Tensor]:
        return self.policy.logprobs(self.updates[0])


def logits(bench: Bench) -> Result:
    """Rows of this rank's vocabulary shard for every token of the first update."""
    (model,) = bench.policy.models()
    rows = []
    for batch in bench.updates[0]:
        packed = packed_sequences(batch.lengths, platform.device())
        with torch.no_grad():
            values = model(batch.tokens[None], batch.positions[None], None, packed_seq_params=packed)
        rows.append(_at(batch, batch.sequence_index >= 0, logits=values))
    return _joined(rows) | {"tensor": bench.parallel.coords.tensor}


def logprobs(bench: Bench) -> Result:
    """Logprob and entropy at every position that predicts a response token of the first update."""
    outputs = bench.initial_logprobs
    batches = bench.updates[0] if outputs else []
    pairs = zip(batches, outputs, strict=True)
    return _joined([_at(batch, batch.mask.bool(), logprob=out[0], entropy=out[1]) for batch, out in pairs])


def _at(batch: MicroBatch, where: Tensor, **values: Tensor) -> dict[str, Tensor]:
    """Values [T, ...] of some positions, with the number of the sample and the position in it."""
    sample = torch.tensor([*batch.sample_ids, -1])[batch.sequence_index]
    columns = {"sample": sample, "position": batch.positions} | values
    return {name: column[where] for name, column in columns.items()}


def _joined(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]} if rows else {}


def scores(bench: Bench) -> Result:
    """What the engine check compares with: logprobs of given sequences, known to every rank."""
    return {"scores": sequence_logprobs(bench.policy, [bench.given.sequence(i) for i in bench.given.first_update])}


def gradient(bench: Bench) -> Result:
    """The whole gradient of this rank's parameters, the sum of its losses; the metrics and loads of the whole job."""
    policy = bench.policy
    parallel = bench.parallel
    policy.expert_load.take(parallel.cpu_group)
    losses = policy.compute_gradients(bench.updates[0], loss_of(bench.settings.algorithm))
    metrics = compute_metrics(reduce_report(UpdateReport(losses, 0.0, 0.0, skipped=False), parallel))
    return {
        "shards": _gradients(policy),
        "held": _held(policy),
        "loss": sum(float(report["train/loss"]) for report in losses),
        "metrics": metrics | mtp_metrics(policy.mtp_loss, parallel),
        "load": policy.expert_load.take(parallel.cpu_group),
    }


def _gradients(policy: TrainedModel) -> dict[str, Tensor]:
    learned = {name: tensor for name, tensor in policy.tensors.items() if tensor.requires_grad}
    return _copy({name: tensor.main_grad for name, tensor in learned.items()})


def updates(bench: Bench) -> Result:
    """Weights after every update of the step; and is the reference then still the policy before it, exactly?

    Also the groups that were used.
    """
    calls = _group_calls()
    policy = Policy(bench.settings, bench.parallel, with_reference=True)
    loss = loss_of(bench.settings.algorithm)
    weights = []
    reports = []
    for number, batches in enumerate(bench.updates, start=1):
        reports.append(policy.update(batches, loss))
        weights.append(_copy(policy.tensors))
        if number == SAVED_AFTER and bench.case.saves:
            _save(bench, policy)
    with policy.use_reference_weights():
        logprobs = policy.logprobs(bench.updates[0])
    return _updated(policy, weights, reports) | {
        "reference": [torch.equal(a, b) for a, b in zip(logprobs, bench.initial_logprobs, strict=True)],
        "kept": all(torch.equal(weights[-1][name], tensor) for name, tensor in policy.tensors.items()),
        "groups": sorted(name for name, number in _group_calls().items() if number > calls[name]),
    }


def _group_calls() -> dict[str, int]:
    """Calls so far, also sends, in each of Megatron's groups for the device that has more than this rank."""
    groups = parallel_state._global_process_group_list[1:]
    return {
        group.group_desc: group._get_sequence_number_for_group()
        for group in groups
        if group.size() > 1 and not group.group_desc.endswith("_GLOO")
    }


def _save(bench: Bench, policy: TrainedModel) -> None:
    folder = bench.checkpoints / bench.case.name
    if bench.parallel.rank == 0:
        folder.mkdir(parents=True)
    dist.barrier(group=bench.parallel.cpu_group)
    save_policy(policy, folder)


def resumed(bench: Bench) -> Result:
    """Weights as another layout saved them before the last update, and after the last update."""
    policy = Policy(bench.settings, bench.parallel, with_reference=False)
    load_policy(policy, bench.checkpoints / bench.case.loads)
    weights = [_copy(policy.tensors)]
    report = policy.update(bench.updates[SAVED_AFTER], loss_of(bench.settings.algorithm))
    return _updated(policy, [*weights, _copy(policy.tensors)], [report])


def _updated(policy: TrainedModel, weights: list[dict[str, Tensor]], reports: list[UpdateReport]) -> Result:
    return {
        "weights": weights,
        "held": _held(policy),
        "grad_norms": [report.grad_norm for report in reports],
        # And that of the next update, which the schedule sets.
        "lrs": [*(report.lr for report in reports), policy.optimizer.param_groups[0]["lr"]],
        "skipped": any(report.skipped for report in reports),
    }


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _held(policy: TrainedModel) -> Result:
    return {"parts": policy.local_shards(), "counts": policy.tp_sizes()}


def exchange(bench: Bench) -> Result:
    """Every rank holds some groups; do the samples that it trains on arrive?"""
    parallel = bench.parallel
    groups = _groups(bench, bench.given.samples)
    assembly = assembly_of(bench.settings, parallel, SMALL["hidden_size"])
    batch = assemble_step_batch(groups, all_gather_sample_info(groups, parallel.cpu_group), 1, assembly)
    packed = [list(update) for update in batch.updates]
    return {"packed": packed, "expected": bench.updates, "data": parallel.coords.data}


def _groups(bench: Bench, samples: Sequence[Sample]) -> list[SampleGroup]:
    """Those that this rank's engine would hold."""
    return [
        SampleGroup(Prompt(i, "", ()), tuple(sample for sample in samples if sample.group_id == i))
        for i in sorted({sample.group_id for sample in samples})
        if i % bench.parallel.world_size == bench.parallel.rank
    ]


def family(bench: Bench) -> Result:
    """The gradient of one update by every algorithm, through all that happens between groups and loss."""
    policy = bench.policy_with_reference
    parallel = bench.parallel
    policy.logprobs = Remembered(policy).logprobs  # type: ignore[method-assign]
    groups = _groups(bench, [bench.given.samples[i] for i in bench.given.first_update])
    infos = all_gather_sample_info(groups, parallel.cpu_group)
    gradients = {}
    for name, tree in FAMILY.items():
        algorithm = AlgorithmConfig.model_validate(tree)
        training = bench.settings.training.model_copy(update={"updates_per_step": 1})
        settings = bench.settings.model_copy(update={"algorithm": algorithm, "training": training})
        assembly = assembly_of(settings, parallel, SMALL["hidden_size"])
        batch = assemble_step_batch(groups, infos, 1, assembly)
        (update,) = compute_logprobs(policy, batch, algorithm, training, adaptive_coefs={})
        update = [replace(one, old_logprobs=one.rollout_logprobs + 0.1 * torch.cos(one.targets)) for one in update]
        policy.compute_gradients(update, loss_of(algorithm, reduce=partial(sum_over_context, parallel=parallel)))
        gradients[name] = {"shards": _gradients(policy), "held": _held(policy)}
    return gradients


def replayed(bench: Bench) -> Result:
    """The gradient of an update whose routers replay given experts, and how many; which bits change by their own."""
    policy = bench.policy
    parallel = bench.parallel
    loss = loss_of(bench.settings.algorithm)
    assert policy.replay
    groups = _groups(bench, with_choices(bench.given.samples, model_shape(policy.hf)))
    infos = all_gather_sample_info(groups, parallel.cpu_group)
    plan = plan_step(bench.given, bench.settings, parallel)[:1]
    (experts,) = exchange_routed_experts(groups, infos, plan, policy.moe_layers, parallel.job, policy.key_layers)
    plain = bench.updates[0]
    batches = [replace(batch, routed_experts=of) for batch, of in zip(plain, experts, strict=True)]
    policy.logprobs(batches)  # forwards without a backward leave nothing behind
    policy.compute_gradients(batches, loss)
    counts = policy.replay.take_counts()
    shards = _gradients(policy)
    policy.compute_gradients([replace(each, routed_experts=_without_keys(each)) for each in batches], loss)
    own_keys = _gradients(policy)
    policy.replay.take_counts()
    policy.compute_gradients(plain, loss)
    own = _gradients(policy)
    plain_outputs, recorded = policy.record_routing(plain)
    policy.compute_gradients(recorded, loss)
    return {
        "shards": shards,
        "held": _held(policy),
        "counts": counts,
        "keys": sum(of.keys.ids.numel() for of in experts if of and of.keys),
        "unlike_own_keys": [name for name, gradient in shards.items() if not gradient.equal(own_keys[name])],
        "unlike_plain": [name for name, gradient in shards.items() if not gradient.equal(own[name])],
        "changed": [name for name, gradient in _gradients(policy).items() if not gradient.equal(own[name])],
        "recorded": policy.replay.take_counts(),
        "logprobs_kept": all(map(torch.equal, plain_outputs, policy.logprobs(recorded))),
    }


def indexers(bench: Bench) -> Result:
    """The gradient of an update that trains the indexers, and their loss."""
    policy = bench.policy
    assert policy.indexer_loss
    policy.logprobs(bench.updates[0])  # forwards without a backward have no loss
    policy.compute_gradients(bench.updates[0], loss_of(bench.settings.algorithm))
    return {"shards": _gradients(policy), "held": _held(policy), "metrics": policy.indexer_loss.take_metrics()}


def _without_keys(batch: MicroBatch) -> ReplayedChoices | None:
    return batch.routed_experts and replace(batch.routed_experts, keys=None)


def supervised(bench: Bench) -> Result:
    """Loss and gradient of chats, each kind of them as one update."""
    policy = bench.policy
    results = {}
    for kind in CHATS:
        data = chat_set(bench.settings.model.path, kind)
        batch = pack_samples(data, range(len(data)), bench.settings.training.max_tokens_per_microbatch, policy)
        with policy.use_head(temperature=1.0):
            sums = reduce_sums(policy.compute_gradients(batch.microbatches, token_mean_loss), bench.parallel)
        results[kind] = {"shards": _gradients(policy), "held": _held(policy), "sums": sums}
    return results


def drifted(bench: Bench) -> Result:
    """What the check of replicas says of equal weights, and of one bit that differs on the last rank, by tensor."""
    policy = Policy(bench.settings, bench.parallel, with_reference=True)
    assert policy.reference
    said = {"equal": _check_replicas(policy)}
    names = {".".join(name.split(".")[-2:]): name for name in policy.tensors}  # one of each kind
    for name in all_gather(sorted(names.values()), bench.parallel.cpu_group)[-1]:
        for where, tensors in (("policy", policy.tensors), ("reference", policy.reference.host_tensors)):
            last = bench.parallel.rank == bench.parallel.world_size - 1
            bits = tensors[name].detach().view(-1).view(torch.int32)[:1] if last else torch.zeros(1, dtype=torch.int32)
            bits.bitwise_xor_(1)
            said[f"{where} {name}"] = _check_replicas(policy)
            bits.bitwise_xor_(1)
    return said


def _check_replicas(policy: Policy) -> str:
    try:
        check_replicas(policy, 7, every=1)
    except EarlyStopError as error:
        return str(error)
    return ""


def broken(bench: Bench) -> Result:
    """The last rank raises while the others wait for it."""
    if bench.parallel.rank == bench.parallel.world_size - 1:
        raise ZeroDivisionError("broken on purpose")
    dist.monitored_barrier(bench.parallel.cpu_group, timeout=timedelta(seconds=5))
    return {}


def converted(bench: Bench) -> Result:
    """What Megatron loads of a converted folder, and a checkpoint converted back."""
    policy = Policy(bench.settings, bench.parallel, with_reference=False)
    direct = copies(policy)
    folder = bench.checkpoints / bench.case.name
    model = bench.settings.model.path
    if bench.parallel.rank == 0:
        to_megatron(model, folder / "converted", _unwatched, part_bytes=100_000)
        (folder / "saved").mkdir()
    dist.barrier(group=bench.parallel.cpu_group)
    save_policy(policy, folder / "saved")
    for tensor in policy.tensors.values():
        tensor.detach().fill_(7.0)
    load_by_megatron(policy, folder / "converted")
    wrong = unequal(policy, direct)
    if bench.parallel.rank == 0:
        to_hf(folder / "saved", folder / "back", model, False, _unwatched)
        wrong += [each.name for each in compare_weights(HfReader(model), HfReader(folder / "back"))]
    return {"wrong": wrong, "count": len(direct)}


def _unwatched(done: int, total: int) -> None:
    """Progress that nobody watches."""


MEASURES: dict[str, Callable[[Bench], Any]] = {
    measure.__name__: measure
    for measure in (
        logits,
        logprobs,
        scores,
        gradient,
        updates,
        resumed,
        exchange,
        family,
        replayed,
        indexers,
        supervised,
        broken,
        drifted,
        converted,
    )
}
