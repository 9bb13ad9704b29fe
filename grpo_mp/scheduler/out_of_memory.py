"""Out of device memory: which rank, in which phase, what holds most of it, and which setting helps."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from grpo_mp.errors import UserError
from grpo_mp.phases import GIB, Phase

LARGEST_ITEMS = 4  # that the message names
ACTIVATION_ADVICE = "lower training.max_tokens_per_microbatch or training.logprob_chunk_tokens"
STATE_ADVICE = "divide the policy further (layout), or let the optimizer keep less (training.megatron_args)"
ADVICE: Mapping[str, str] = {
    Phase.LOGPROB: ACTIVATION_ADVICE,
    Phase.TRAIN: f"{ACTIVATION_ADVICE}, set training.recompute=full, or {STATE_ADVICE}",
    Phase.SYNC: "lower sync.bucket_bytes or engine.args.mem_fraction_static",
    Phase.SAVE: STATE_ADVICE,
}
MemoryItems = Callable[[], Mapping[str, float]]  # bytes on the device, by what they are


@contextmanager
def explain_out_of_memory(rank: int, phase: str, items: MemoryItems) -> Iterator[None]:
    """Raise the allocator's error as one sentence (UserError)."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        largest = sorted((item for item in items().items() if item[1]), key=lambda item: -item[1])[:LARGEST_ITEMS]
        usage = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in largest) or "nothing of this rank"
        advice = ADVICE.get(phase, STATE_ADVICE)
        raise UserError(f"rank {rank} in {phase}: out of device memory; it holds {usage}: {advice}") from error
