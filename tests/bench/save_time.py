"""How long a save holds up a step, asynchronous and not: python -m tests.bench.save_time

A float32 policy of 46 million parameters on one CPU rank is saved three times each way. Printed are the seconds that
`save` takes, those until the checkpoint is complete, the peak of resident memory above that before, and the longest
pause of another thread that wants to run every millisecond, as the loop does while engines answer; then the ratio of
both ways, the bytes on disk of a parameter, and the peak of a load in pieces of 32 MiB.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from grpo_mp.algorithms.losses import token_mean_loss
from grpo_mp.checkpoint.run_state import TrainState, checkpoint_folder
from grpo_mp.config import Settings
from grpo_mp.policy.checkpoint import load_policy
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.save import CheckpointSaver
from tests.bench.small_policy import MIB, padding, peak_bytes, settled_bytes, start_small_policy

SAVES, TICK_S, PIECE_BYTES = 3, 0.001, 2**25


def main() -> None:
    """Command line; see the text above."""
    with start_small_policy() as (settings, parallel):
        policy = Policy(settings, parallel, with_reference=False)
        policy.update([padding(256)], token_mean_loss)
        held_up = [_save(settings, policy, async_save) for async_save in (True, False)]
        checkpoint = checkpoint_folder(settings.run.folder, SAVES - 1)
        parameters = sum(tensor.numel() for tensor in policy.tensors.values())
        stored = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        peak = _peak_above(lambda: load_policy(policy, checkpoint / "policy"))
    print(f"asynchronous / synchronous: {held_up[0] / held_up[1]:.2f}; {stored / parameters:.2f} bytes a parameter")
    print(f"load: peak {peak / MIB:.0f} MiB above the policy")


def _save(settings: Settings, policy: Policy, async_save: bool) -> float:
    """Save some times and print the figures; return the least seconds that a step is held up."""
    run = settings.run.model_copy(update={"async_save": async_save, "piece_bytes": PIECE_BYTES})
    held_up, complete, pauses, peaks = [], [], list[float](), []
    with CheckpointSaver(run, policy, 600.0) as saver:

        def save(step: int) -> None:
            start = time.perf_counter()
            saver.save(TrainState(step=step))
            held_up.append(_since(start))
            saver.finish()
            complete.append(_since(start))

        for step in range(SAVES):
            with _longest_pause(pauses):
                peaks.append(_peak_above(partial(save, step)))
    name = "asynchronous" if async_save else "synchronous"
    print(
        f"{name:12} held up {min(held_up):.2f} s, complete after {min(complete):.2f} s, "
        f"peak {max(peaks) / MIB:.0f} MiB above the policy, longest pause of another thread {max(pauses):.3f} s"
    )
    return min(held_up)


def _since(start: float) -> float:
    return time.perf_counter() - start


@contextmanager
def _longest_pause(pauses: list[float]) -> Iterator[None]:
    stop = threading.Event()

    def tick() -> None:
        longest = 0.0
        while not stop.is_set():
            start = time.perf_counter()
            time.sleep(TICK_S)
            longest = max(longest, _since(start) - TICK_S)
        pauses.append(longest)

    thread = threading.Thread(target=tick)
    thread.start()
    yield
    stop.set()
    thread.join()


def _peak_above(run: Callable[[], object]) -> int:
    """Resident memory at its highest while `run` runs, above that before."""
    before = settled_bytes()
    return peak_bytes(run) - before


if __name__ == "__main__":
    main()
