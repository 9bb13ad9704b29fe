"""This rank's engine: starts it, detects its loss, and restarts it in a thread while training continues."""

import logging
import time
from itertools import count
from threading import Event, Lock

import torch.distributed as dist

from grpo_mp.config.sections import EngineConfig
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.distributed.ports import own_address
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import STOP_LIMIT_S, EngineProcess
from grpo_mp.utils.background import BackgroundTask, EventLoopThread
from grpo_mp.utils.errors import EngineError, UserError, one_line

LOGGER = logging.getLogger(__name__)
POLL_S = 0.5
START_TIMEOUT_S = 3600.0  # time limit of an engine's start
RESTART_WINDOW_S = 3600.0  # a restart counts toward `engine.max_restarts` for this long


class HostedEngine:
    """The engine that this rank hosts. `client` is None while the engine is starting or lost.

    A lost engine is restarted in a thread; `join` makes the restarted engine available again.
    """

    def __init__(
        self,
        config: EngineConfig,
        process: EngineProcess,
        loop: EventLoopThread,
        routing: ModelShape | None,
        request_timeout_s: float,
    ) -> None:
        """Store the parts without starting anything.

        `routing`: shape of the model whose routed experts samples record, if any.
        """
        self.client: EngineClient | None = None
        self.is_lost = False  # the engine is restarting, or is about to
        self._config = config
        self._process = process
        self._request_timeout_s = request_timeout_s
        self._loop = loop
        self._routing = routing
        self._store: dist.Store | None = None
        self._restart: BackgroundTask | None = None
        self._watch: BackgroundTask | None = None
        self._ready: EngineClient | None = None  # client of the restarted engine until `join`
        # Number of processes so far; times of losses [s]
        self._lives = 0
        self._losses = list[float]()
        self._losing = Lock()
        self._stopped = Event()

    def start(self, store: dist.Store) -> None:
        """Start the engine process without waiting until it is ready. `store`: the job's store."""
        self._store = store
        self._launch()
        if self._process.spec.nodes > 1:
            self._watch = BackgroundTask(self._watch_nodes, f"nodes of engine {self._process.spec.index}")

    def wait_ready(self) -> None:
        """Wait until the engine answers requests and connect the client."""
        self.client = self._connect()

    def lose(self, error: EngineError, client: EngineClient | None = None, generates: bool = False) -> None:
        """Mark the engine as lost, and restart it at once if the trainer does not occupy its devices.

        `client`: source of the error; errors from the client of an earlier process are ignored. `generates`: the
        devices belong to the engines in the current phase. Raises UserError after `engine.max_restarts` restarts.
        """
        with self._losing:  # a weight sync and requests may report the loss at the same time
            if self._stopped.is_set() or self.client is None or client not in (None, self.client):
                return
            self._loop.submit(self.client.aclose())
            self.client = None
            self._count_loss(error)
        if generates or self._config.owns_devices:
            self.restart()

    def restart(self) -> None:
        """Start the restart of a lost engine in a thread, unless it is already restarting."""
        with self._losing:  # `lose` may still be stopping the engine
            if self.is_lost and self._restart is None:
                self._restart = BackgroundTask(self._start_again, f"engine {self._process.spec.index} starts again")

    def join(self, wait: bool) -> bool:
        """Make a restarted engine available again, still without weights; return whether a restarted engine was ready.

        `wait`: wait for the restart. Raises UserError after `engine.max_restarts` restarts.
        """
        if wait:
            self.restart()
        if wait and self._restart:
            self._restart.wait(self._process.spec.rank, "an engine's start", None)  # starts and phases have own limits
        self.check()
        if self._ready is None:
            return False
        with self._losing:
            self.client = self._ready
            self.is_lost = False
            self._ready = self._restart = None
        return True

    def check(self) -> None:
        """Re-raise an exception of the engine's threads."""
        for task in filter(None, (self._watch, self._restart)):
            task.check()

    def stop(self) -> None:
        """Stop the engine, whether it runs, is lost or is restarting."""
        with self._losing:
            self._stopped.set()  # `lose` ignores later errors
        self._process.stop()
        for task in filter(None, (self._watch, self._restart)):
            task.has_ended(STOP_LIMIT_S)
        self._process.stop()  # the restart thread may have started another process in the meantime
        for client in filter(None, (self.client, self._ready)):
            self._loop.run(client.aclose())
        self.client = self._ready = None

    def _launch(self) -> None:
        self._lives += 1
        if self._process.spec.nodes == 1:
            self._process.start()
            return
        assert self._store
        address = self._process.start(host=own_address())
        self._store.set(life_key(self._process.spec, self._lives, "address"), address or "")

    def _connect(self) -> EngineClient:
        self._process.wait_ready(START_TIMEOUT_S)
        client = EngineClient(
            self._process.spec.index, self._process.url, self._process.headers, self._request_timeout_s
        )
        if self._routing:
            self._loop.run(client.check_routed_experts(self._routing))
        return client

    def _start_again(self) -> None:
        """Start the engine until a start succeeds; a failed start counts as a loss."""
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
        """Stop the lost process and count the loss. Raises UserError if `engine.max_restarts` is exceeded."""
        reason = self._process.describe_end() or str(error)
        self._process.stop()
        if self._process.spec.nodes > 1:
            assert self._store
            self._store.set(life_key(self._process.spec, self._lives, "ended"), "")
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
        """Mark the engine as lost when another node reports that its process has ended."""
        assert self._store
        while not self._stopped.wait(POLL_S):
            client = self.client
            key = life_key(self._process.spec, self._lives, "node_ended")
            if client and self._store.check([key]):
                self.lose(EngineError(self._store.get(key).decode()), client)


class EngineNode:
    """Part of a multi-node engine on a node other than the engine host's; starts and stops with the engine host."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._stopped = Event()
        self._task: BackgroundTask | None = None

    def start(self, store: dist.Store) -> None:
        """Start a thread that follows the engine host's messages in the job's store."""
        self._task = BackgroundTask(lambda: self._follow(store), f"node of engine {self._process.spec.index}")

    def check(self) -> None:
        """Re-raise an exception of the thread."""
        if self._task:
            self._task.check()

    def stop(self) -> None:
        """Stop the thread and this node's process."""
        self._stopped.set()
        if self._task:
            self._task.has_ended(STOP_LIMIT_S)
        self._process.stop()

    def _follow(self, store: dist.Store) -> None:
        """Start and stop this node's process with each process of the engine host; report an early end."""
        for life in count(1):
            address, ended, node_ended = (
                life_key(self._process.spec, life, what) for what in ("address", "ended", "node_ended")
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


def life_key(spec: EngineSpec, life: int, what: str) -> str:
    """Return the store key of a message about one process of an engine.

    `life`: number of the process, counted from 1 over restarts; `what`: kind of message.
    """
    return f"engine/{spec.index}/{life}/{what}"
