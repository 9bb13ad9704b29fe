"""What libraries say on a good run, and a user can do nothing about, is not shown. Everything else is."""

import logging
import warnings

# (message, module) patterns of Megatron and torch at their pinned versions.
WARNINGS = (
    # Megatron calls collectives by names that torch has renamed.
    (r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed\.c10d_logger"),
    # The distributed optimizer asks its own shards, views of the parameters, for a gradient they never have.
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\.optimizer"),
    # Megatron reads checkpoints by a name, and of a tensor kind, that torch means to give up.
    (r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\."),
    (r"Please use DTensor instead", r"torch\.distributed\.checkpoint\."),
)
LOGGERS = (
    "megatron.core.rerun_state_machine",  # announces that it is not in use
    "matplotlib",  # announces where it keeps its list of fonts
)
# (logger, beginning of a message) that megatron-core says from 0.19 on.
MESSAGES = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
)


def silence_known_warnings() -> None:
    """Leave out the known notices of this process; errors, and warnings of anything else, stay."""
    for message, module in WARNINGS:
        warnings.filterwarnings("ignore", message, module=module)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, beginning in MESSAGES:
        logging.getLogger(name).addFilter(_Without(beginning))


class _Without(logging.Filter):
    """Lets everything pass but messages with this beginning."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)
