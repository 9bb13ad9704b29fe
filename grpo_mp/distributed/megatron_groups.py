"""Megatron's process groups of several layouts in one process, of which one is in use at a time.

Megatron keeps groups, ranks and sizes of one layout in its modules. Its model, optimizer and schedules take groups as
arguments, too, but parts of each (routers, rotary embeddings, gradients of norms, recomputation) read the modules.
"""

import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils

STATE = re.compile(r"_[A-Z][A-Z_]*")
# Scratch memory: whoever uses it writes it first.
SHARED = frozenset({"_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER"})
ROUTER_LOSSES = re.compile(r"_MOE_[A-Z_]+_TRACKER")  # by layer of one model; from 0.19 on in a module of its own
MOE_LOGGING = "megatron.core.transformer.moe.moe_logging"

Values = dict[tuple[str, str], Any]  # by module and name


class MegatronGroups:
    """What Megatron's modules hold of one layout: `in_use` puts it there, and behind it back what was there."""

    def __init__(self) -> None:
        """Take what is there now, which Megatron's initialize_model_parallel has just made."""
        self._values, self._rng_states = _read(), get_cuda_rng_tracker().get_states()
        self._group = parallel_state.get_data_parallel_group()

    @property
    def are_in_use(self) -> bool:
        """Return whether Megatron's modules hold these groups now."""
        return parallel_state.get_data_parallel_group() is self._group

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let Megatron use these groups inside. Nothing is done where it does so already."""
        if self.are_in_use:
            yield
            return
        outer, outer_states = _read(), get_cuda_rng_tracker().get_states()
        _write(self._values)
        get_cuda_rng_tracker().set_states(self._rng_states)
        try:
            yield
        finally:
            self._values, self._rng_states = _read(), get_cuda_rng_tracker().get_states()
            _write(outer)
            get_cuda_rng_tracker().set_states(outer_states)


@contextmanager
def groups_set_aside() -> Iterator[None]:
    """Let Megatron make groups inside as if it had none; those that it had, if any, are in use again behind it.

    Its list of all groups, whose communicators are suspended together, has those of both.
    """
    if not parallel_state.model_parallel_is_initialized():
        yield
        return
    outer, outer_states = _read(leave_out=frozenset()), get_cuda_rng_tracker().get_states()
    _write({place: {} if isinstance(value, dict) else None for place, value in outer.items()})
    try:
        yield
    finally:
        _write(outer)
        get_cuda_rng_tracker().set_states(outer_states)


def _modules() -> dict[str, tuple[ModuleType, re.Pattern[str]]]:
    """Return the modules that hold what belongs to a layout, or to the model in it, and how its names look."""
    modules = [(parallel_state, STATE), (moe_utils, ROUTER_LOSSES)]
    if find_spec(MOE_LOGGING):
        modules.append((import_module(MOE_LOGGING), ROUTER_LOSSES))
    return {module.__name__: (module, names) for module, names in modules}


def _read(leave_out: Set[str] = SHARED) -> Values:
    return {
        (place, name): value
        for place, (module, names) in _modules().items()
        for name, value in vars(module).items()
        if names.fullmatch(name) and name not in leave_out
    }


def _write(values: Values) -> None:
    modules = _modules()
    for (place, name), value in values.items():
        setattr(modules[place][0], name, value)
