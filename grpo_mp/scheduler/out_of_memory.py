"""Out of device memory: which rank, in which phase, what holds most of it, and which setting helps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from grpo_mp.errors import UserError
from grpo_mp.scheduler.phases import Phase

GIB, SHOWN = 2**30, 4
COMPUTING = "lower optimizer.max_tokens_per_microbatch or optimizer.logprob_chunk_tokens"
STATE = "divide the policy further (layout), or let the optimizer keep less (optimizer.megatron)"
HELP: Mapping[str, str] = {
    Phase.LOGPROB: COMPUTING,
    Phase.TRAIN: f"{COMPUTING}, set optimizer.recompute=full, or {STATE}",
    Phase.SYNC: "lower sync.bucket_bytes or engine.args.mem_fraction_static",
    Phase.SAVE: STATE,
}
Items = Callable[[], Mapping[str, float]]  # bytes on the device, by what they are


@contextmanager
def explain_out_of_memory(rank: int, phase: str, items: Items) -> Iterator[None]:
    """Turn the allocator's error into one sentence (UserError)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(sentence(rank, phase, items())) from error


def sentence(rank: int, phase: str, items: Mapping[str, float]) -> str:
    """What to say. Pure."""
    largest = sorted((item for item in items.items() if item[1]), key=lambda item: -item[1])[:SHOWN]
    held = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in largest) or "nothing of this rank"
    return f"rank {rank} in {phase}: out of device memory; it holds {held}: {HELP.get(phase, STATE)}"
