"""A converted folder (config, tokenizer, torch_dist) by the names of Hugging Face tensors, to start from or compare.

A run may start from one: every rank reads the parameters it holds a part of.
"""

from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from grpo_mp.checkpoint.describe import is_torch_dist
from grpo_mp.checkpoint.hf_reader import HfReader, holds_weights
from grpo_mp.checkpoint.non_policy_tensors import open_non_policy_tensors
from grpo_mp.checkpoint.to_megatron import Model
from grpo_mp.checkpoint.torch_dist_reader import TorchDistReader
from grpo_mp.models.mapping import unfuse


class ConvertedReader:
    """Reads as HfReader does."""

    def __init__(self, folder: Path, verify: bool = False) -> None:
        """Raises UserError where a file is missing or torn, and where config.json is of another model.

        `verify`: compare each file with its checksum before it is used.
        """
        self.folder = folder
        self._model, self._reader = Model.of(folder), TorchDistReader(folder, verify)
        self._reader.check_layers(self._model.hf.int("num_hidden_layers"))
        self._extras = open_non_policy_tensors(folder, verify)
        self._owners = {name: owner for owner, param in self._model.params.items() for name in param.hf}
        self._dtypes = {owner: self._reader.dtype(self._model.places[owner]) for owner in self._model.params}
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def __enter__(self) -> "ConvertedReader":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._last = "", {}

    @property
    def names(self) -> frozenset[str]:
        """Tensors of the model."""
        return self.stored_names

    @property
    def stored_names(self) -> frozenset[str]:
        """The same, and what was carried along."""
        return frozenset(self._owners) | (self._extras.stored_names if self._extras else frozenset())

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._owners:
            return self._carried.shape(name)
        param = self._model.params[self._owners[name]]
        return param.shapes[param.hf.index(name)]

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[self._owners[name]] if name in self._owners else self._carried.dtype(name)

    def read(self, name: str, axis: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """The whole tensor, or [start, stop) along `axis`."""
        whole = self.read_stored(name)
        return whole if axis is None else whole.narrow(axis, start, stop - start)

    def read_stored(self, name: str) -> Tensor:
        if name not in self._owners:
            return self._carried.read_stored(name)
        owner = self._owners[name]
        if self._last[0] != owner:  # the tensors of a fused parameter are asked for one after the other
            param = self._model.params[owner]
            whole = self._reader.read(self._model.places[owner])
            self._last = owner, dict(zip(param.hf, unfuse(param, whole), strict=True))
        return self._last[1][name]

    @property
    def _carried(self) -> HfReader:
        assert self._extras is not None
        return self._extras


def open_weights(folder: Path, verify: bool = False) -> HfReader | ConvertedReader:
    """Of a Hugging Face folder or of a converted one. Raises UserError where it is neither, or torn.

    `verify`: compare each file that has a checksum with it before it is used.
    """
    converted = is_torch_dist(folder) and not holds_weights(folder)
    return ConvertedReader(folder, verify) if converted else HfReader(folder, verify=verify)
