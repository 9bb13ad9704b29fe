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
LOGGERS = ("megatron.core.rerun_state_machine",)  # announces that it is not in use


def hush_libraries() -> None:
    """Leave out the known notices of this process; errors, and warnings of anything else, stay."""
    for message, module in WARNINGS:
        warnings.filterwarnings("ignore", message, module=module)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
