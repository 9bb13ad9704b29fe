"""Save and load weights, optimizer state and learning-rate schedule, so that any layout can load any checkpoint.

Weights and state are stored as rectangles of the Hugging Face tensors (models/chunks.py). Each rank saves the piece of
each flattened parameter that the distributed optimizer assigns to it, so ranks write similar amounts.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from grpo_mp.checkpoint.chunk_files import (
    OPTIMIZER_FOLDER,
    WEIGHT,
    ChunkWriter,
    TensorChunk,
    WrittenChunks,
    read_chunks,
    write_index,
)
from grpo_mp.distributed.coordinates import tensor_part, tp_size
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.models.chunks import chunks_of, matrix_shape
from grpo_mp.models.mapping import Param
from grpo_mp.policy.adam_state import state_dict_without_copies, stores_param_remainders
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.utils.errors import DiskError, UserError, one_line

Value = TypeVar("Value")
LEARNING_RATES = {"max_lr", "min_lr"}  # keys of a param group that come from the settings, not from the checkpoint
Written = Mapping[Path, WrittenChunks]  # folder -> chunks that one rank wrote there

COMMON = "common.pt"
MAIN_PARAM = "main_param"
MOMENTS = ("exp_avg", "exp_avg_sq")


def write_common(policy: TrainedModel, folder: Path) -> None:
    """Write the state that is equal on all ranks to common.pt, on rank 0."""
    if policy.parallel.rank == 0:
        content = BytesIO()  # torch.save to a file would report a full disk as RuntimeError, not as OSError
        torch.save(_common(policy), content)
        (folder / COMMON).write_bytes(content.getbuffer())


def weights_writer(policy: TrainedModel, folder: Path) -> ChunkWriter:
    """Return a writer of this rank's share of the weights, which must not change until it has finished."""
    return ChunkWriter(folder, policy.parallel.rank, weight_chunks(policy, policy.trained_tensors))


def write_reference(policy: TrainedModel, folder: Path) -> Written:
    """Write this rank's share of the reference model's weights and return the written chunks."""
    if policy.reference is None:
        raise ValueError("this policy was built without a reference")
    chunks = weight_chunks(policy, policy.reference.host_tensors)
    return {folder: ChunkWriter(folder, policy.parallel.rank, chunks).write()}


def optimizer_writer(policy: TrainedModel, folder: Path) -> ChunkWriter:
    """Return a writer of this rank's optimizer state, which must not change until it has finished."""
    return ChunkWriter(folder / OPTIMIZER_FOLDER, policy.parallel.rank, optimizer_chunks(policy))


def on_all_ranks(work: Callable[[], Value], folder: Path, group: dist.ProcessGroup) -> Value:
    """Run `work` on every rank of the group and return this rank's result once all ranks have succeeded.

    An OSError on one rank raises DiskError on every rank; any other exception raises RuntimeError on the other ranks.
    """
    value = None
    error = None
    try:
        value = work()
    except Exception as caught:  # noqa: BLE001 - the others wait for this rank; it is raised below
        error = caught
    reason = (one_line(error) or type(error).__name__) if error else ""
    of_disk = error is None or isinstance(error, OSError)
    reasons: list[tuple[bool, str]] = all_gather((of_disk, reason), group)
    if error and not of_disk:
        raise error
    for rank, (is_disk_error, text) in enumerate(reasons):
        if not is_disk_error:
            raise RuntimeError(f"rank {rank}, which was to write below {folder}: {text}")
    for rank, (_, text) in enumerate(reasons):
        if text:
            raise DiskError(f"{folder} cannot be written (rank {rank}): {text}") from error
    return value  # type: ignore[return-value]


def gather_written(written: Written, group: dist.ProcessGroup) -> dict[Path, list[WrittenChunks]]:
    """Return the chunks of all ranks by folder, on the first rank of the group; {} on the other ranks."""
    by_rank: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(written, by_rank, dst=0, group=group)
    return {folder: [other[folder] for other in by_rank] for folder in written} if by_rank else {}


def write_indexes(written: Mapping[Path, list[WrittenChunks]]) -> None:
    """Write the index of each folder. `written`: folder -> the chunks of each rank."""
    for folder, chunks in written.items():
        write_index(folder, chunks)


def load_policy(policy: TrainedModel, folder: Path) -> None:
    """Load weights, optimizer state and learning-rate schedule, saved in any layout."""
    common = read_common(folder)
    read_chunks(local_weight_chunks(policy, policy.trained_tensors), folder)
    saved = common["main_weights"]
    expected = _main_weight_format(policy)
    if saved != expected:
        raise UserError(
            f"{folder}: the checkpoint holds main weights as {saved}, training.megatron_args asks for {expected}: set "
            "use_precision_aware_optimizer and store_param_remainders, and optimizer.offload, as they were"
        )
    if common["adapters"] != policy.adapters:
        raise UserError(
            f"{folder}: the checkpoint's adapters are {common['adapters'] or 'none'}, the adapters of model.lora "
            f"{policy.adapters or 'none'}: set it as it was, or start with another run.folder"
        )
    # A layout has separate optimizers for dense and expert parameters only if their sharding differs. Both are at the
    # same step, so any saved param group (step, learning rates) fits either.
    groups = [
        group | {"is_expert_parallel": expert} for group in common["optimizer_groups"] for expert in (False, True)
    ]
    parts = policy.optimizer.chained_optimizers
    with state_dict_without_copies(parts):
        for part in parts:
            # All groups have the same rates. Newer Megatron matches saved groups to its own by their rates, too.
            rates = {name: part.param_groups[0][name] for name in LEARNING_RATES & part.param_groups[0].keys()}
            part.load_state_dict({"optimizer": {"param_groups": [group | rates for group in groups]}})
    read_chunks(optimizer_chunks(policy), folder / OPTIMIZER_FOLDER)
    policy.lr_scheduler.load_state_dict(common["schedule"])
    if policy.loss_scaler:
        policy.loss_scaler.load_state_dict(common["loss_scaler"])


def load_reference(policy: Policy, folder: Path) -> None:
    """Load the reference model's weights, saved in any layout; do nothing if the policy has no reference."""
    if policy.reference:
        read_chunks(local_weight_chunks(policy, policy.reference.host_tensors), folder)


def _common(policy: TrainedModel) -> dict[str, Any]:
    with state_dict_without_copies(policy.optimizer.chained_optimizers):
        states = [part.state_dict() for part in policy.optimizer.chained_optimizers]
    return {
        "optimizer_groups": [group for part in states for group in part["optimizer"]["param_groups"]],
        "schedule": policy.lr_scheduler.state_dict(),
        "main_weights": _main_weight_format(policy),
        "adapters": policy.adapters,
        "loss_scaler": policy.loss_scaler.state_dict() if policy.loss_scaler else {},
    }


def read_common(folder: Path) -> dict[str, Any]:
    """Read common.pt: param groups, learning-rate schedule, loss scale and adapter description."""
    try:
        common: dict[str, Any] = torch.load(folder / COMMON, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / COMMON}: the checkpoint cannot be read: {one_line(error)}") from error
    return common


def _main_weight_format(policy: TrainedModel) -> str:
    return "remainders" if stores_param_remainders(policy.optimizer.chained_optimizers) else "whole"


def optimizer_chunks(policy: TrainedModel) -> Iterator[TensorChunk]:
    """Yield the chunks of this rank's optimizer state: Adam's moments and main weights."""
    for part, model_param, name in _optimized(policy):
        start, stop = _piece(part, model_param)
        for state_name, tensor in _state_tensors(part, model_param).items():
            yield from _chunks(policy, policy.params[name], state_name, tensor.detach().view(-1), start, stop)


def weight_chunks(policy: TrainedModel, tensors: Mapping[str, Tensor]) -> Iterator[TensorChunk]:
    """Yield the chunks that this rank saves: the pieces that its optimizer owns, and buffers. `tensors`: by name."""
    pieces = {name: _piece(part, model_param) for part, model_param, name in _optimized(policy)}
    coords = policy.parallel.coords
    for name, tensor in tensors.items():
        param = policy.params[name]
        flat = tensor.detach().view(-1)
        if name in pieces:
            start, stop = pieces[name]
            yield from _chunks(policy, param, WEIGHT, flat[start:stop], start, stop)
        elif not policy.tensors[name].requires_grad:  # in no optimizer, so replicated over data-parallel ranks
            first = coords.expert_data == 0 if param.expert is not None else coords.context == coords.data == 0
            yield from _chunks(policy, param, WEIGHT, flat, 0, len(flat)) if first else ()


def local_weight_chunks(policy: TrainedModel, tensors: Mapping[str, Tensor]) -> Iterator[TensorChunk]:
    """Yield the chunks of this rank's whole shards, to be filled from a checkpoint. `tensors`: by name."""
    for name, tensor in tensors.items():
        yield from _chunks(policy, policy.params[name], WEIGHT, tensor.detach().view(-1), 0, tensor.numel())


def _optimized(policy: TrainedModel) -> Iterator[tuple[MegatronOptimizer, torch.nn.Parameter, str]]:
    names = {tensor: name for name, tensor in policy.tensors.items()}
    for part in policy.optimizer.chained_optimizers:
        for model_param in part.model_param_group_index_map:
            yield part, model_param, names[model_param]


def _piece(part: MegatronOptimizer, model_param: torch.nn.Parameter) -> tuple[int, int]:
    piece = part._get_model_param_range_map(model_param)["param"]
    return piece.start, piece.end


def _chunks(
    policy: TrainedModel, param: Param, kept: str, flat: Tensor, start: int, stop: int
) -> Iterator[TensorChunk]:
    layout = policy.parallel.layout
    coords = policy.parallel.coords
    tp_rank = coords.tensor if param.expert is None else coords.expert_tensor
    for chunk in chunks_of(param, tp_size(param, layout), part=tensor_part(param, coords), start=start, stop=stop):
        yield TensorChunk(
            name=f"{kept}/{param.hf[chunk.tensor]}",
            shape=matrix_shape(param.shapes[chunk.tensor]),
            offsets=chunk.offsets,
            tensor=flat[chunk.start - start : chunk.stop - start].view(chunk.sizes),
            is_replica=param.alias or (param.tp_dim is None and tp_rank > 0),
        )


def _state_tensors(part: MegatronOptimizer, model_param: torch.nn.Parameter) -> dict[str, Tensor]:
    group, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group]["params"][order]
    state = part.optimizer.state[main_param]
    tensors = {name: state[name] for name in MOMENTS}
    if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return tensors | {MAIN_PARAM: state["master_param"]}
    own_storage = main_param.untyped_storage().data_ptr() != model_param.untyped_storage().data_ptr()
    return tensors | ({MAIN_PARAM: main_param} if own_storage else {})
