"""What is measured of exports in a layout, as in measures.py."""

import resource
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.distributed.stages import layers_of_stages
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import SCALE, quantize
from grpo_mp.models.mapping import Param
from grpo_mp.models.weight_formats import BLOCKWISE_FP8
from grpo_mp.planner.parameter_count import with_mtp_layer
from grpo_mp.rollout.shared_memory import packed_bytes
from grpo_mp.trainer.save import export_policy
from grpo_mp.utils.errors import UserError
from grpo_mp.weight_sync.plan import ROUNDS_IN_MEMORY, WHOLE, Piece, RankRound, group_params, plan_sync
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.transport import IpcTransport
from grpo_mp.weight_sync.update import plan_rounds
from grpo_mp.weight_sync.wire import WireFormat
from tests.parallel.cases import KINDS
from tests.parallel.measures import Bench, Result
from tests.shard_holders import shard_holders
from tests.weight_sync.sent_messages import sent_messages


def export(bench: Bench) -> Result:
    """Names of exported tensors, and of those that are not bit for bit in the folder the policy was read from."""
    targets = {"first": (0,), "all": tuple(_ranks(bench))}
    return {"folders": _exported_folders(bench)} | {name: _export(bench, ranks) for name, ranks in targets.items()}


def _exported_folders(bench: Bench) -> list[str]:
    """Names of tensors that folders written by all ranks hold otherwise than the model's; the first rank's answer."""
    wrong: list[str] = []
    case = bench.case
    # One rank shows what a family's files have in FP8; models of each kind show how ranks divide blocks.
    in_fp8 = not family_of(bench.policy.hf).stacks_experts and (case.ranks == 1 or case.model in (*KINDS, "qwen3_next"))
    for fp8 in (False, True) if in_fp8 else (False,):
        folder = bench.checkpoints / f"{bench.case.name}_export_{fp8}"
        form = BLOCKWISE_FP8 if fp8 else None
        bucket = _least_bucket(WireFormat(bench.policy.params, bench.policy.tp_sizes(), torch.float32, form))
        export_policy(bench.policy, folder, bench.settings.model.path, bucket, fp8)
        if bench.parallel.rank == 0:
            wrong += compare_folders(folder, bench.settings.model.path, fp8, bench.policy.params)
    return wrong


def _least_bucket(wire: WireFormat) -> int:
    """Return the least memory for weights on their way: it makes the most rounds."""
    return ROUNDS_IN_MEMORY * wire.largest_group[1]


def full_disk(bench: Bench) -> str:
    """Return what an export raises on this rank when the last one may write no file of more than a few bytes."""
    settings = bench.settings
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = bench.checkpoints / f"{bench.case.name}_export_failed"
    if bench.parallel.rank == bench.parallel.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        export_policy(bench.policy, folder, settings.model.path, settings.sync.bucket_bytes)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def compare_folders(folder: Path, model: Path, fp8: bool, params: Mapping[str, Param]) -> list[str]:
    pairs = chain.from_iterable(zip(param.hf, param.in_fp8, strict=True) for param in params.values())
    quantized = {name for name, in_fp8 in pairs if in_fp8 and fp8}
    with HfReader(folder) as written, HfReader(model) as source:
        expected = {}
        for name in source.stored_names:
            expected[name] = source.read(name)
            if name in quantized:
                expected[name], expected[name + SCALE] = quantize(expected[name])
        if written.stored_names != expected.keys():
            return ["other names"]
        stored = {name: written.read_stored(name) for name in expected}
        return [
            name
            for name, tensor in expected.items()
            if tensor.dtype != stored[name].dtype
            or not torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8))
        ]


def _ranks(bench: Bench) -> range:
    return range(bench.parallel.world_size)


def _export(bench: Bench, targets: tuple[int, ...]) -> Result:
    policy = bench.policy
    wire = WireFormat(policy.params, policy.tp_sizes(), torch.float32)
    bucket = _least_bucket(wire)
    group = bench.parallel.cpu_group
    per_node = len(_ranks(bench))
    rounds = plan_rounds(wire, policy.local_shards(), lambda _: {WHOLE: targets}, bucket, group, per_node)
    resharder = Resharder(rounds, wire, policy.tensors)
    names = []
    wrong = []
    forwarded = []
    messages = list[int]()
    stages = resharder.stages(rounds)
    planned = _planned_rounds(bench, wire, targets)
    sent = [spec for round_ in planned for shard in chain(*round_.sends.values()) for spec in wire.shard_specs(shard)]
    with HfReader(bench.settings.model.path) as reader:
        for round_ in rounds:
            with sent_messages() as of_round:
                staged = next(stages)
            messages += of_round
            # What this rank's engine would load on a GPU.
            loaded = IpcTransport(wire, bench.parallel.rank).forward(round_, staged)
            names += [name for name, _ in staged]
            forwarded += [name for name, _ in loaded]
            wrong += [name for name, tensor in (*staged, *loaded) if not _same(tensor, reader.read(name))]
    assert next(stages, None) is None
    everything = [spec.name for spec in wire.all_specs(Piece(n) for n, p in wire.params.items() if not p.alias)]
    return {
        "names": names,
        "wrong": wrong,
        "rounds": len(rounds),
        "planned": rounds == planned and sum(messages) == packed_bytes(sent),
        "forwarded": sorted(forwarded) == sorted(everything if bench.parallel.rank in targets else []),
    }


def _planned_rounds(bench: Bench, wire: WireFormat, targets: tuple[int, ...]) -> tuple[RankRound, ...]:
    """Plan from the layout alone, without the other ranks."""
    layout = bench.settings.layout
    world_size = bench.parallel.world_size
    decoder = layers_of_stages(bench.policy.config.num_layers, layout, bench.settings.training.megatron_args)
    stages = with_mtp_layer(decoder, bench.policy.hf)
    sent = {name: param for name, param in wire.params.items() if not param.alias}
    holders = shard_holders(sent, layout, world_size, stages)
    round_bytes = wire.round_bytes(_least_bucket(wire))
    per_node = bench.parallel.job.ranks_per_node
    plan = plan_sync(group_params(sent), holders, lambda _: {WHOLE: targets}, per_node, wire.sizes, round_bytes)
    return plan.of_rank(bench.parallel.rank)


def _same(some: Tensor, other: Tensor) -> bool:
    return some.dtype == other.dtype and torch.equal(some, other)


EXPORT_MEASURES: dict[str, Callable[[Bench], Any]] = {measure.__name__: measure for measure in (export, full_disk)}
