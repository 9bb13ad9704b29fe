"""This rank's engine over all its lives: started, lost, and started again beside the loop."""

import logging
import time
from itertools import count
from threading import Event, Lock

import torch.distributed as dist

from grpo_mp.config.sections import EngineConfig
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.distributed.ports import own_address
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_layout import EnginePlacement
from grpo_mp.rollout.server import STOP_LIMIT_S, EngineProcess
from grpo_mp.utils.background import BackgroundTask, EventLoopThread
from grpo_mp.utils.errors import EngineError, UserError, one_line

LOGGER = logging.getLogger(__name__)
POLL_S = 0.5
START_TIMEOUT_S = 3600.0  # of an engine
RESTART_WINDOW_S = 3600.0  # restarts count for `engine.max_restarts` this long


class HostedEngine:
    """The engine that this rank talks to. `client` is None while it does not work.

    A lost engine is restarted in a thread, and works from `join` on.
    """

    def __init__(
        self,
        config: EngineConfig,
        placement: EnginePlacement,
        process: EngineProcess,
        loop: EventLoopThread,
        routing: ModelShape | None,
        owns_devices: bool,
        request_timeout_s: float,
    ) -> None:
        """Store the parts; nothing is started. `owns_devices`: the trainer never uses the engine's devices."""
        self.client: EngineClient | None = None
        self.is_lost = False  # it starts again, or is about to
        self._config, self._placement, self._process = config, placement, process
        self._request_timeout_s = request_timeout_s
        self._loop, self._routing, self._owns_devices = loop, routing, owns_devices
        self._store: dist.Store | None = None
        self._restart: BackgroundTask | None = None
        self._watch: BackgroundTask | None = None
        self._ready: EngineClient | None = None  # of the one that was started again
        self._lives, self._losses = 0, list[float]()  # processes so far; times of restarts
        self._losing, self._stopped = Lock(), Event()

    @property
    def index(self) -> int:
        return self._placement.engine

    @property
    def address(self) -> tuple[str, dict[str, str]] | None:
        """Return the server's URL and its request headers; None while it does not work."""
        return (self._process.url, self._process.headers) if self.client else None

    def start(self, store: dist.Store) -> None:
        """Start the process without waiting for it."""
        self._store = store
        self._launch()
        if self._placement.nodes > 1:
            self._watch = BackgroundTask(self._watch_nodes, f"nodes of engine {self._placement.engine}")

    def wait_ready(self) -> None:
        """Wait until the engine answers."""
        self.client = self._connect()

    def lose(self, error: EngineError, client: EngineClient | None = None, generates: bool = False) -> None:
        """Mark the engine as lost, and restart it at once if it has its devices.

        `client`: the source of the error; errors of an earlier process are ignored. `generates`: engines have the
        devices now. Raises UserError after `engine.max_restarts`.
        """
        with self._losing:  # a sync and requests may notice it at once
            if self._stopped.is_set() or self.client is None or client not in (None, self.client):
                return
            self._loop.submit(self.client.aclose())
            self.client = None
            self._count_loss(error)
        if generates or self._owns_devices:
            self.restart()

    def restart(self) -> None:
        """Begin to restart a lost engine in a thread."""
        with self._losing:  # it may still be ending
            if self.is_lost and self._restart is None:
                self._restart = BackgroundTask(self._start_again, f"engine {self._placement.engine} starts again")

    def join(self, wait: bool) -> bool:
        """Use the engine again once it has restarted, without weights; return whether it joins.

        `wait`: wait for its restart. Raises UserError after `engine.max_restarts`.
        """
        if wait:
            self.restart()
        if wait and self._restart:
            self._restart.wait(self._placement.rank, "an engine's start", None)  # each start and the phase have limits
        self.check()
        if self._ready is None:
            return False
        with self._losing:
            self.client, self.is_lost = self._ready, False
            self._ready = self._restart = None
        return True

    def check(self) -> None:
        """Raise the error of this engine's threads, if any."""
        for task in filter(None, (self._watch, self._restart)):
            task.check()

    def stop(self) -> None:
        """End the engine in any state."""
        with self._losing:
            self._stopped.set()  # later errors are no loss
        self._process.stop()
        for task in filter(None, (self._watch, self._restart)):
            task.has_ended(STOP_LIMIT_S)
        self._process.stop()  # it may have looked for another port meanwhile
        for client in filter(None, (self.client, self._ready)):
            self._loop.run(client.aclose())
        self.client = self._ready = None

    def _launch(self) -> None:
        self._lives += 1
        if self._placement.nodes == 1:
            self._process.start()
            return
        assert self._store
        address = self._process.start(host=own_address())
        self._store.set(life_key(self._placement, self._lives, "address"), address or "")

    def _connect(self) -> EngineClient:
        self._process.wait_ready(START_TIMEOUT_S)
        client = EngineClient(self._placement.engine, self._process.url, self._process.headers, self._request_timeout_s)
        if self._routing:
            self._loop.run(client.check_routed_experts(self._routing))
        return client

    def _start_again(self) -> None:
        while True:
            with self._losing:
                if self._stopped.is_set() or not self.is_lost:
                    return
                self._launch()
            try:
                self._ready = self._connect()
                return
            except EngineError as error:
                with self._losing:
                    if not self._stopped.is_set():
                        self._count_loss(error)

    def _count_loss(self, error: EngineError) -> None:
        """End the engine. Raises UserError where it was lost too often to start again."""
        reason = self._process.describe_end() or str(error)
        self._process.stop()
        if self._placement.nodes > 1:
            assert self._store
            self._store.set(life_key(self._placement, self._lives, "ended"), "")
        now = time.monotonic()
        self._losses = [then for then in self._losses if now - then < RESTART_WINDOW_S]
        if len(self._losses) >= self._config.max_restarts:
            self.is_lost = False
            limit = f" (started again {len(self._losses)} times: engine.max_restarts)" if self._losses else ""
            raise UserError(f"{reason}{limit}") from error
        self._losses.append(now)
        self.is_lost = True
        LOGGER.warning("%s: it is started again", one_line(error))
        self._process.keep_log(f"lost_{self._lives}")

    def _watch_nodes(self) -> None:
        assert self._store
        while not self._stopped.wait(POLL_S):
            client, key = self.client, life_key(self._placement, self._lives, "node_ended")
            if client and self._store.check([key]):
                self.lose(EngineError(self._store.get(key).decode()), client)


class EngineNode:
    """Secondary node of a multi-node engine: it starts and ends with the engine's host."""

    def __init__(self, placement: EnginePlacement, process: EngineProcess) -> None:
        self._placement, self._process, self._stopped = placement, process, Event()
        self._task: BackgroundTask | None = None

    def start(self, store: dist.Store) -> None:
        """Follow the engine's host in a thread, by its keys in the job's store."""
        self._task = BackgroundTask(lambda: self._follow(store), f"node of engine {self._placement.engine}")

    def check(self) -> None:
        """Raise the error of the thread, if any."""
        if self._task:
            self._task.check()

    def stop(self) -> None:
        """End this node's process."""
        self._stopped.set()
        if self._task:
            self._task.has_ended(STOP_LIMIT_S)
        self._process.stop()

    def _follow(self, store: dist.Store) -> None:
        for life in count(1):
            address, ended, node_ended = (
                life_key(self._placement, life, what) for what in ("address", "ended", "node_ended")
            )
            while not store.check([address]):
                if self._stopped.wait(POLL_S):
                    return
            self._process.start(dist_init_addr=store.get(address).decode())
            while not store.check([ended]):
                if self._stopped.wait(POLL_S):
                    return
                if sentence := self._process.describe_end():
                    store.set(node_ended, sentence)
            self._process.stop()


def life_key(placement: EnginePlacement, life: int, what: str) -> str:
    """Return the store key for messages about one process of an engine, counted by `life`."""
    return f"engine/{placement.engine}/{life}/{what}"
