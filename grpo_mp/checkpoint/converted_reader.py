"""Read a converted folder (config, tokenizer, torch_dist) by the names of Hugging Face tensors.

A run may start from one: every rank reads the parameters it has a shard of.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_mp.checkpoint.convert import ModelMapping
from grpo_mp.checkpoint.describe import is_converted
from grpo_mp.checkpoint.hf_reader import HfReader, open_non_policy_tensors
from grpo_mp.checkpoint.torch_dist_reader import TorchDistReader


class ConvertedReader:
    """Reads full tensors, as HfReader does."""

    def __init__(self, folder: Path, family: str | None = None) -> None:
        """Open a folder; refuse one with missing files, or with a config.json of another model."""
        self.folder = folder
        self.absent: Mapping[str, str] = {}
        self._model, self._reader = ModelMapping.of(folder, family), TorchDistReader(folder)
        self._reader.check_layers(self._model.hf.int("num_hidden_layers"))
        extra = open_non_policy_tensors(folder)
        self._non_policy = dict.fromkeys(extra.stored_names, extra) if extra else {}
        self._params = {name: param for param in self._model.params.values() for name in param.hf}
        self.names = self.stored_names = frozenset(self._params) | frozenset(self._non_policy)
        params, slots = self._model.params, self._model.slots
        self._dtypes = {name: self._reader.hf_dtype(param, slots[name]) for name, param in params.items()}
        self._cached_param = ""  # the tensors of a fused parameter are asked for one after the other
        self._cached: dict[str, Tensor] = {}

    def __enter__(self) -> "ConvertedReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._cached_param, self._cached = "", {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a Hugging Face tensor."""
        param = self._params.get(name)
        return param.shapes[param.hf.index(name)] if param else self._non_policy[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a Hugging Face tensor is stored."""
        return self._dtypes[self._params[name].name] if name in self._params else self._non_policy[name].dtype(name)

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """Return the full tensor, or [start, stop) along `axis`; what is no part of the policy comes dequantized."""
        if name not in self._params:
            return self._non_policy[name].read(name, axis, start, stop)
        tensor = self.read_stored(name)
        return tensor if axis is None else tensor.narrow(axis, start, stop - start)

    def read_stored(self, name: str) -> Tensor:
        """Return the full tensor in its stored dtype."""
        if name not in self._params:
            return self._non_policy[name].read_stored(name)
        param = self._params[name]
        if self._cached_param != param.name:
            tensors = self._reader.read_hf(param, self._model.slots[param.name])
            self._cached_param, self._cached = param.name, dict(zip(param.hf, tensors, strict=True))
        return self._cached[name]


def open_weights(folder: Path, family: str | None = None) -> HfReader | ConvertedReader:
    """Open a Hugging Face folder or a converted one. `family`: as in `HfConfig`."""
    return ConvertedReader(folder, family) if is_converted(folder) else HfReader(folder)
