"""Transport of a round's staged weights from the ranks of an engine to the engine's processes.

Each rank describes the shared memory that its engine process loads. The engine's host, the only rank with a client,
sends all descriptions in one request.
"""

import base64
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from grpo_mp import platform
from grpo_mp.config.sections import PauseMode
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.rollout.shared_memory import (
    LOADER,
    Export,
    NamedTensors,
    as_tensor,
    export_by_ipc,
    export_to_host,
    pack,
    packed_bytes,
    select,
    unpack,
)
from grpo_mp.utils.errors import EngineTimeout
from grpo_mp.weight_sync.plan import RankRound
from grpo_mp.weight_sync.wire import WireFormat

LOAD_TIMEOUT_S = 600.0  # time limit of loading one round into an engine
Operation = tuple[Callable[..., Any], torch.Tensor, int]  # isend or irecv, the tensor, and the other rank


@dataclass(frozen=True)
class EngineLink:
    """A rank's link to its engine for weight updates. A lost engine is skipped.

    `engine_group`: gloo group of the engine's ranks, host first; `node_group`: gloo group of all engine ranks of the
    node.
    """

    rollout: Rollout
    transport: "HostTransport | IpcTransport"
    engine_group: dist.ProcessGroup
    node_group: dist.ProcessGroup
    pause: PauseMode | None = None  # how running requests are paused during the update; None: no requests run
    with_draft: bool = False  # whether to update the drafting layer as well
    _sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "weight_sync"))

    def begin(self) -> None:
        """Pause the engine's requests and begin a weight update."""
        with self.rollout.losing_engine() as client:
            if client and self.pause:
                self.rollout.call(client.pause_generation(self.pause))
            if client:
                self.rollout.call(client.begin_weight_update(self.with_draft))

    @contextmanager
    def loading(self, round_: RankRound, staged: NamedTensors) -> Iterator[None]:
        """Load a round into the engine while the body runs; then wait until the node's engines have loaded it.

        `staged`: tensors that this rank staged; the list is emptied.
        """
        with self.transport.export(round_, staged) as exports:
            payloads = all_gather(serialize(exports), self.engine_group)
            request = None
            if client := self.rollout.client:
                coroutine = client.update_weights_from_tensor(payloads, load_format=LOADER)
                request = self._sender.submit(self.rollout.call, coroutine)
            try:
                yield
            finally:
                if client and request:
                    with self.rollout.losing_engine():
                        self._wait(request, client.index)
            # The larger group contains the hosts of all engines that read this node's memory.
            dist.barrier(group=max(self.engine_group, self.node_group, key=dist.get_world_size))

    def _wait(self, request: "Future[None]", engine: int) -> None:
        try:
            request.result(LOAD_TIMEOUT_S)
        except TimeoutError as error:
            message = f"engine {engine}: weights were not loaded within {LOAD_TIMEOUT_S:g} s"
            raise EngineTimeout(message) from error

    def end(self, version: int) -> None:
        """End the update, set the engine's weight version, and resume its requests."""
        with self.rollout.losing_engine() as client:
            if client:
                self.rollout.call(client.end_weight_update(version, keep_cache=self.pause == "in_place"))
            if client and self.pause:
                self.rollout.call(client.continue_generation())
        dist.barrier(group=self.engine_group)


@dataclass(frozen=True)
class HostTransport:
    """Shares staged tensors with all engine processes of a node in shared host memory."""

    wire: WireFormat
    node_group: dist.ProcessGroup
    rank: int  # this rank's number in the sync plan

    @contextmanager
    def export(self, round_: RankRound, staged: NamedTensors) -> Iterator[list[Export]]:
        """Export this rank's staged tensors; yield the parts of all ranks' exports that this rank's process loads."""
        with export_to_host(staged, self.wire.all_specs(round_.staged)) as own:
            by_rank = dict(all_gather((self.rank, own), self.node_group))
            yield [
                select(by_rank[receiver], {spec.name for spec in self.wire.all_specs(pieces)})
                for receiver, pieces in round_.loads.items()
            ]


@dataclass(frozen=True)
class IpcTransport:
    """Exchanges staged tensors among the ranks of a node; each rank shares them with its engine process by CUDA IPC.

    Thus an engine process maps only memory of its own GPU; memory of another GPU would need a CUDA context there.
    """

    wire: WireFormat
    rank: int  # this rank's number in the sync plan
    group: dist.ProcessGroup | None = None  # process group of the plan's ranks; None: the default group

    @contextmanager
    def export(self, round_: RankRound, staged: NamedTensors) -> Iterator[list[Export]]:
        """Yield one export with all tensors that this rank's engine process loads."""
        loaded = self.forward(round_, staged)
        staged.clear()
        specs = [spec for pieces in round_.loads.values() for spec in self.wire.all_specs(pieces)]
        with export_by_ipc(loaded, specs) as own:
            yield [own]

    def forward(self, round_: RankRound, staged: NamedTensors) -> NamedTensors:
        """Exchange staged tensors within the node; return the tensors that this rank's engine process loads.

        The staging rank sends each of n readers 1/n of a message; then the readers exchange their parts.
        """
        by_name = dict(staged)
        messages = {}
        for (receiver, readers), pieces in round_.shares.items():
            specs = self.wire.all_specs(pieces)
            message = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=platform.device())
            if receiver == self.rank:
                pack([by_name[spec.name] for spec in specs], specs, message)
            else:
                by_name |= zip([spec.name for spec in specs], unpack(message, specs), strict=True)
            messages[receiver, readers] = dict(zip(readers, message.tensor_split(len(readers)), strict=True))
        first = list[Operation]()
        second = list[Operation]()
        for (receiver, _), parts in messages.items():
            for reader, part in parts.items():
                if self.rank == receiver:
                    first.append((dist.isend, part, reader))
                elif self.rank == reader:
                    first.append((dist.irecv, part, receiver))
                else:
                    second += [(dist.isend, parts[self.rank], reader), (dist.irecv, part, reader)]
        for operations in (first, second):
            self._exchange([operation for operation in operations if len(operation[1])])
        loads = [spec.name for pieces in round_.loads.values() for spec in self.wire.all_specs(pieces)]
        return [(name, by_name[name]) for name in loads]

    def _exchange(self, operations: Sequence[Operation]) -> None:
        requests = [dist.P2POp(run, part, None, self.group, group_peer=rank) for run, part, rank in operations]
        for request in dist.batch_isend_irecv(requests) if requests else ():
            request.wait()


class _Pickler(pickle.Pickler):
    """Pickles uint8 tensors as lists, since SGLang rejects the loader that Megatron-Core 0.19 sets for storages."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.ByteTensor, (value.tolist(),)) if isinstance(value, torch.Tensor) else NotImplemented


def serialize(exports: Sequence[Export]) -> str:
    """Encode exports as the base64 of a pickle, which SGLang decodes and passes to LOADER."""
    file = io.BytesIO()
    _Pickler(file).dump([("exports", as_tensor(exports))])
    return base64.b64encode(file.getvalue()).decode()
