"""Save a policy, or critic, alone, at once: CheckpointSaver (trainer/save.py) saves a run."""

from pathlib import Path

import torch.distributed as dist

from grpo_mp.policy.checkpoint import (
    Written,
    gather_written,
    on_all_ranks,
    optimizer_writer,
    weights_writer,
    write_common,
    write_indexes,
)
from grpo_mp.policy.trained_model import TrainedModel


def save_policy(policy: TrainedModel, folder: Path) -> None:
    """Write weights, optimizer and learning-rate step into an empty, existing folder. Every rank must call this."""
    group = policy.parallel.cpu_group

    def write() -> Written:
        write_common(policy, folder)
        writers = weights_writer(policy, folder), optimizer_writer(policy, folder)
        return {writer.folder: writer.write() for writer in writers}

    write_indexes(gather_written(on_all_ranks(write, folder, group), group))
    dist.barrier(group=group)  # the first rank has written the index
