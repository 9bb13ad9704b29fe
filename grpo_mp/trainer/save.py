"""Save checkpoints; export Hugging Face and peft folders."""

import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from torch import Tensor

from grpo_mp.checkpoint.chunk_files import ChunkWriter, share_buffer
from grpo_mp.checkpoint.hf_reader import HfReader, read_non_policy_tensors
from grpo_mp.checkpoint.hf_writer import begin_hf, complete_hf, fp8_config, write_peft, write_shards
from grpo_mp.checkpoint.run_state import (
    TrainState,
    begin_checkpoint,
    checkpoint_folder,
    prune_checkpoints,
    write_manifest,
)
from grpo_mp.checkpoint.stacked_experts import stack_experts
from grpo_mp.config.sections import RunConfig
from grpo_mp.distributed.process_groups import Parallel, all_gather, make_groups
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import expert_projections
from grpo_mp.models.multi_token_prediction import copied_names
from grpo_mp.models.weight_formats import BLOCKWISE_FP8
from grpo_mp.policy.checkpoint import (
    Written,
    gather_written,
    on_all_ranks,
    optimizer_writer,
    weights_writer,
    write_common,
    write_indexes,
    write_reference,
)
from grpo_mp.policy.critic import Critic
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.trained_model import TrainedModel
from grpo_mp.utils.background import BackgroundTask
from grpo_mp.utils.errors import DiskError, one_line
from grpo_mp.utils.phases import Phase
from grpo_mp.weight_sync.plan import WHOLE, ParamGroup, Piece, Readers, Slice, group_params
from grpo_mp.weight_sync.reshard import Resharder
from grpo_mp.weight_sync.update import plan_rounds
from grpo_mp.weight_sync.wire import WireFormat

# folders of a checkpoint
POLICY = "policy"
REFERENCE = "reference"
CRITIC = "critic"
FAILED_LIMIT_S = 20.0  # how long a run that failed waits for its last checkpoint
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Save:
    """A checkpoint that is written in the background."""

    task: BackgroundTask
    folder: Path
    step: int


class CheckpointSaver:
    """Saves checkpoints, partly in the background: a checkpoint is complete once its manifest is written."""

    def __init__(
        self, run: RunConfig, policy: Policy, limit_s: float, weights_stay: bool = False, critic: Critic | None = None
    ) -> None:
        """Create the process group of the background threads. `limit_s`: time limit of a save in seconds.

        `weights_stay`: weights are not offloaded between updates, so they may be written in the background, unless a
        reference model is swapped with them.
        """
        self._run = run
        self._policy = policy
        self._limit_s = limit_s
        self._models: dict[str, TrainedModel] = {POLICY: policy} | ({CRITIC: critic} if critic else {})
        self._weights_later = weights_stay and policy.reference is None
        self._task: _Save | None = None
        self.saved_step = 0  # step of the last complete checkpoint of this process
        # A separate group, because the loop uses the other groups meanwhile.
        group = make_groups([range(policy.parallel.world_size)], limit_s)
        assert group is not None  # every rank is in it
        self._group = group

    def save(self, state: TrainState, before: Callable[[], None] = lambda: None) -> None:
        """Begin a checkpoint, which `finish` completes; before that, the optimizer state must not change or move.

        `before`: flushes other files first, may raise OSError.
        """
        self.finish()
        folder = checkpoint_folder(self._run.folder, state.step)
        with self._removing_half(folder):
            written, writers = self._begin(folder, state, before)
        write_rest = partial(self._write_rest, folder, deepcopy(state), written, writers)
        task = BackgroundTask(write_rest, f"save of step {state.step} on rank {self._policy.parallel.rank}")
        self._task = _Save(task, folder, state.step)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; re-raise its error, or PhaseTimeout after the time limit."""
        save = self._task
        self._task = None
        if not save:
            return
        with self._removing_half(save.folder):
            save.task.wait(self._policy.parallel.rank, Phase.SAVE, self._limit_s)
        self.saved_step = save.step

    @contextmanager
    def _removing_half(self, folder: Path) -> Iterator[None]:
        """Remove the checkpoint folder if the disk fails in the body."""
        try:
            yield
        except DiskError as error:
            if self._policy.parallel.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise DiskError(f"{error}; make room, or name another run.folder, and start again") from error

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the checkpoint; after an error wait only FAILED_LIMIT_S, since other ranks may have ended."""
        if kind is None:
            self.finish()
        elif self._task:
            try:
                self._task.task.wait(self._policy.parallel.rank, Phase.SAVE, FAILED_LIMIT_S)
            except Exception as error:  # noqa: BLE001 - the error that ends the run is the one to report
                LOGGER.warning("the last checkpoint is not complete: %s", one_line(error))

    def _begin(self, folder: Path, state: TrainState, before: Callable[[], None]) -> tuple[Written, list[ChunkWriter]]:
        """Create the checkpoint folder, and write the parts that the next step changes before its update."""
        rank = self._policy.parallel.rank
        group = self._policy.parallel.cpu_group

        def begin() -> None:
            before()
            if rank == 0:
                begin_checkpoint(folder)
                for name in self._models:
                    (folder / name).mkdir()

        on_all_ranks(begin, folder, group)
        return on_all_ranks(partial(self._write_first, folder, state.reference_updated), folder, group)

    def _write_first(self, folder: Path, with_reference: bool) -> tuple[Written, list[ChunkWriter]]:
        """Write the parts that the next step changes before its update; return them and writers for the rest."""
        models = [(model, folder / name) for name, model in self._models.items()]
        for model, own_folder in models:
            write_common(model, own_folder)
        weights = [weights_writer(model, own_folder) for model, own_folder in models]
        if self._weights_later and not with_reference:
            return {}, share_buffer([*weights, *self._optimizer_writers(folder)])
        written = {writer.folder: writer.write() for writer in share_buffer(weights)}
        del weights  # frees their buffer
        if with_reference:
            written |= write_reference(self._policy, folder / REFERENCE)
        return written, share_buffer(self._optimizer_writers(folder))

    def _optimizer_writers(self, folder: Path) -> list[ChunkWriter]:
        return [optimizer_writer(model, folder / name) for name, model in self._models.items()]

    def _write_rest(self, folder: Path, state: TrainState, first: Written, writers: Sequence[ChunkWriter]) -> None:
        """Write the parts that only an update changes and complete the checkpoint; runs in a thread of each rank."""
        rank = self._policy.parallel.rank
        group = self._group

        def write() -> Written:
            return {**first, **{writer.folder: writer.write() for writer in writers}}

        by_folder = gather_written(on_all_ranks(write, folder, group), group)

        def complete() -> None:
            if rank == 0:
                write_indexes(by_folder)
                write_manifest(folder, state)

        on_all_ranks(complete, folder, group)
        if rank == 0:
            try:
                prune_checkpoints(self._run.folder, self._run.keep_checkpoints)
            except OSError as error:  # the new checkpoint is complete
                LOGGER.warning("an old checkpoint cannot be removed: %s", one_line(error))


def export_policy(policy: Policy, folder: Path, like: Path, bucket_bytes: int | None, fp8: bool = False) -> None:
    """Write a policy as a Hugging Face folder, with config, tokenizer, template and untrained tensors from `like`.

    Every rank writes its share. Memory: a round of `bucket_bytes` on the device, a shard and a tensor on the host.
    """
    parallel = policy.parallel
    group = parallel.cpu_group
    form = BLOCKWISE_FP8 if fp8 else None
    wire = WireFormat(policy.base_params, policy.tp_sizes(), policy.config.params_dtype, form)
    stacks = family_of(policy.hf).stacks_experts
    writers = export_writers(wire, parallel.world_size, stacks)
    tensors = _on_host(wire, policy.weight_shards(), policy.weights, writers, bucket_bytes, parallel)
    written = stack_experts(tensors, policy.config.num_moe_experts) if stacks else tensors
    others = read_non_policy_tensors(like, policy.hf, fp8=fp8, rank=parallel.rank, size=parallel.world_size)
    copies = _copied_names(like, policy.hf)

    def write() -> list[str]:
        try:
            return write_shards(folder, chain(_with_copies(written, copies), others), parallel.rank)
        finally:
            deque(tensors, maxlen=0)  # a rank that cannot write still takes part in all rounds

    on_all_ranks(lambda: begin_hf(folder) if parallel.rank == 0 else None, folder, group)
    shards = list(chain.from_iterable(all_gather(on_all_ranks(write, folder, group), group)))
    quantization = fp8_config(policy.hf) if fp8 else None
    on_all_ranks(lambda: complete_hf(folder, shards, like, quantization) if parallel.rank == 0 else None, folder, group)


def export_adapters(policy: Policy, folder: Path, like: Path, bucket_bytes: int | None) -> None:
    """Write the LoRA adapters as a peft folder for the model in `like`."""
    parallel = policy.parallel
    lora = policy.lora
    assert lora
    params = {name: param for name, param in policy.params.items() if name not in policy.base_params}
    wire = WireFormat(params, policy.tp_sizes(), policy.config.params_dtype)
    parts = {name: part for name, part in policy.local_shards().items() if name in params}
    tensors = [*_on_host(wire, parts, policy.tensors, lambda _: {WHOLE: (0,)}, bucket_bytes, parallel)]
    of_experts = expert_projections(policy.base_params.values())
    family = family_of(policy.hf)

    def write() -> None:
        if parallel.rank == 0:
            write_peft(folder, tensors, model=like, lora=lora, family=family, expert_projections=of_experts)

    on_all_ranks(write, folder, parallel.cpu_group)


def _on_host(
    wire: WireFormat,
    shards: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    readers: Readers,
    bucket_bytes: int | None,
    parallel: Parallel,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (name, host copy) of the full tensors that this rank reads.

    It exchanges one round of shards at a time.
    """
    per_node = parallel.job.ranks_per_node
    rounds = plan_rounds(
        wire, shards, readers=readers, bucket_bytes=bucket_bytes, group=parallel.cpu_group, ranks_per_node=per_node
    )
    stages = chain.from_iterable(Resharder(rounds, wire, tensors).stages(rounds))
    return ((name, tensor.to("cpu", copy=True)) for name, tensor in stages)


def _copied_names(like: Path, hf: HfConfig) -> dict[str, str]:
    copies = copied_names(hf)
    if not copies:
        return {}
    with HfReader(like) as reader:
        return {name: copy for name, copy in copies.items() if copy in reader.names}


def _with_copies(tensors: Iterable[tuple[str, Tensor]], copies: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        if name in copies:
            yield copies[name], tensor.clone()  # safetensors refuses tensors that share memory


def export_writers(wire: WireFormat, world_size: int, stacks_experts: bool = False) -> Readers:
    """Return a function from parameter group to the rank that writes it, with about equal bytes on all ranks.

    `stacks_experts`: a rank writes all experts of a layer.
    """
    written = [0] * world_size
    writers: dict[ParamGroup, dict[Slice, tuple[int, ...]]] = {}
    of_layer: dict[int | None, int] = {}
    for group in group_params(wire.params):
        rank = written.index(min(written))
        if stacks_experts and group.expert is not None:
            rank = of_layer.setdefault(wire.params[group.names[0]].layer, rank)
        written[rank] += sum(wire.sizes.staged(Piece(name)) for name in group.names)
        writers[group] = {WHOLE: (rank,)}
    return writers.__getitem__
