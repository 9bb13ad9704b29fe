"""Silence library notices that appear in good runs and that users cannot act on; nothing else."""

import logging
import warnings
from functools import partial

# (message, module) patterns of Megatron and torch at their pinned versions.
WARNINGS = (
    # Megatron uses deprecated names of torch's collectives.
    (r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed\.c10d_logger"),
    # The distributed optimizer reads .grad of its shards, views of the parameters, which never have one.
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\.optimizer"),
    # Megatron reads checkpoints with a function and a tensor class that torch has deprecated.
    (r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\."),
    (r"Please use DTensor instead", r"torch\.distributed\.checkpoint\."),
    # Megatron-Core 0.19 reads checkpoints by itself on every rank, and passes arguments in an order that torch changed.
    (r"torch\.distributed is disabled, unavailable or uninitialized", r"torch\.distributed\.checkpoint\."),
    (r"The argument order of load has been changed", r"torch\.distributed\.checkpoint\."),
)
LOGGERS = (
    "megatron.core.rerun_state_machine",  # says that it is not in use
    "matplotlib",  # says where it caches its fonts
)
# (logger, prefix of a message) of megatron-core from 0.19 on.
MESSAGES = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
)


def silence_known_warnings() -> None:
    """Silence the known notices in this process; errors and other warnings still appear."""
    for message, module in WARNINGS:
        warnings.filterwarnings("ignore", message, module=module)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, prefix in MESSAGES:
        logging.getLogger(name).addFilter(partial(_lacks_prefix, prefix))


def _lacks_prefix(prefix: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(prefix)
