"""A Hugging Face config.json, read strictly: a missing key is an error that names the file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.errors import Number, UserError, read_number

DEFAULT_ROPE_THETA = 10000.0  # where a file leaves rope_theta out


@dataclass(frozen=True)
class HfConfig:
    """The plain contents of config.json; `path` is the folder it came from."""

    path: Path
    values: dict[str, Any]
    family: str | None = None  # name or path of its model family; None: by model_type
    file: str = "config.json"

    @classmethod
    def read(cls, folder: Path, family: str | None = None, name: str = "config.json") -> "HfConfig":
        """Read a folder's config.json; raises UserError where it is missing or not a JSON object."""
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} does not exist: give a Hugging Face folder or a converted checkpoint")
        try:
            values = json.loads(file.read_text())
        except ValueError as error:
            raise UserError(f"{file}: not valid JSON ({error})") from error
        if not isinstance(values, dict):
            raise UserError(f"{file}: expected an object of settings, found {type(values).__name__}: copy it again")
        return cls(folder, values, family, name)

    @property
    def model_type(self) -> str:
        """Return `model_type`, 'None' where it is missing."""
        return str(self.values.get("model_type"))

    @property
    def tied(self) -> bool:
        """Return whether embedding and output layer share their weights."""
        return bool(self.values.get("tie_word_embeddings", False))

    @property
    def head_dim(self) -> int:
        """Return the head size of grouped-query attention; by default hidden size / number of heads."""
        given = self._number("head_dim", self.values.get("head_dim") or 0, int)
        return given or self.int("hidden_size") // self.int("num_attention_heads")

    @property
    def rope(self) -> dict[str, Any]:
        """Return the rotary settings with `rope_theta`, as transformers 4 or 5 writes them.

        Where a file has both, those that 5 uses win. Raises UserError where kinds of layers have different rotations.
        """
        nested = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if any(isinstance(value, dict) for value in nested.values()):
            raise self.error("rope_parameters of single kinds of layers are not supported")
        theta = self.values.get("rope_theta") or DEFAULT_ROPE_THETA
        rope_type = nested.get("rope_type", nested.get("type", "default"))
        return {
            **nested,
            "rope_theta": self._number("rope_theta", nested.get("rope_theta", theta), float),
            "rope_type": rope_type,
        }

    def rope_float(self, key: str) -> float:
        """Return a required number of the rope scaling; raises UserError where it is missing."""
        if self.rope.get(key) is None:
            raise self.error(f"{key} of the rope scaling is missing")
        return self._number(key, self.rope[key], float)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value as it is in the file, or `default`."""
        return self.values.get(key, default)

    def int(self, *keys: str) -> int:
        """Return an integer. `keys`: synonyms, any of which the file may have. Raises UserError where they differ."""
        given = {key: self._number(key, self.values[key], int) for key in keys if self.values.get(key) is not None}
        if len(set(given.values())) > 1:
            raise self.error(f"{' and '.join(f'{key}={value}' for key, value in given.items())} contradict each other")
        return next(iter(given.values())) if given else self._number(keys[0], self._require(keys[0]), int)

    def float(self, key: str) -> float:
        """Return a required number. Raises UserError where it is missing or not a number."""
        return self._number(key, self._require(key), float)

    def expect(self, key: str, *allowed: Any) -> None:
        """Raise UserError unless the value (absent counts as the first allowed) is one the family supports."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise self.error(f"{key}={value!r} is not supported, only {choices}")

    def error(self, sentence: str) -> UserError:
        """Return the error to raise about this config, with the file's name before `sentence`."""
        return UserError(f"{self.path / self.file}: {sentence}")

    def _number(self, key: str, value: Any, kind: type[Number]) -> Number:
        return read_number(kind, value, f"{self.path / self.file}: {key}")

    def _require(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise self.error(f"{key} is missing")
        return self.values[key]
