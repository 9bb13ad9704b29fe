"""Strict access to a Hugging Face config.json: a missing or unsupported value raises an error that names the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.utils.errors import Number, UserError, read_number
from grpo_mp.utils.reading import read_json

OF_WHOLE_MODEL = ("architectures", "model_type", "vision_config")  # keys that say nothing of the text model in it
MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # synonyms: key of Qwen, key of all others
QUANTIZATION_CONFIG = "quantization_config"
DEFAULT_ROPE_THETA = 10000.0  # if config.json does not set rope_theta

# Weights in INT4 as compressed-tensors describes those of Kimi-K2-Thinking and K2.5.
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def _is_int4(quantization: dict[str, Any]) -> bool:
    groups = (quantization.get("config_groups") or {}).values()
    packed = (quantization.get("quant_method"), quantization.get("format")) == ("compressed-tensors", "pack-quantized")
    return packed and bool(groups) and all(map(_is_int4_group, groups))


def _is_int4_group(group: dict[str, Any]) -> bool:
    weights = group.get("weights") or {}
    same = all(weights.get(key) == value for key, value in INT4.items())
    return same and not weights.get("actorder") and group.get("input_activations") is None


@dataclass(frozen=True)
class HfConfig:
    """Raw contents of a config.json. `path`: its folder."""

    path: Path
    values: dict[str, Any]
    family: str | None = None  # name or path of the model family; None: by model_type
    file: str = "config.json"
    trains_mtp: bool = False  # the policy includes the multi-token-prediction layer
    is_text_part: bool = False  # the text model of a folder that also has a vision tower

    @classmethod
    def read(
        cls, folder: Path, family: str | None = None, name: str = "config.json", trains_mtp: bool = False
    ) -> "HfConfig":
        """Read config.json, or the file `name`, from a folder."""
        file = folder / name
        if not file.exists():
            raise UserError(
                f"{file} does not exist: give a Hugging Face folder, or download one (hf download OWNER/NAME "
                f"--local-dir {folder}); `grpo-mp plan CONFIG` does without it"
            )
        values = read_json(file)
        if not isinstance(values, dict):
            raise UserError(f"{file}: expected an object of settings, found {type(values).__name__}: copy it again")
        text = values.get("text_config")
        if isinstance(text, dict):
            whole = {key: value for key, value in values.items() if key not in (*OF_WHOLE_MODEL, "text_config")}
            values = whole | text
        return cls(folder, values, family, name, trains_mtp, is_text_part=isinstance(text, dict))

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type"))

    @property
    def tied(self) -> bool:
        return bool(self.values.get("tie_word_embeddings", False))

    @property
    def policy_layers(self) -> int:
        layers = self.int("num_hidden_layers")
        if not self.trains_mtp:
            return layers
        if self.tied:
            raise self.error("tie_word_embeddings=true: set model.mtp_loss_scaling_factor to 0")
        if self.mtp_layers != 1:
            raise self.error(
                f"{' or '.join(MTP_LAYERS)}={self.mtp_layers}, and model.mtp_loss_scaling_factor trains one "
                "multi-token-prediction layer: set it to 0"
            )
        return layers + 1

    @property
    def mtp_layers(self) -> int:
        """Return the number of multi-token-prediction layers; Qwen3-Next, with gated delta nets, counts none."""
        counts = (self.values[key] for key in MTP_LAYERS if self.values.get(key) is not None)
        return int(next(counts, "linear_num_key_heads" in self.values))

    @property
    def head_dim(self) -> int:
        given = self._number("head_dim", self.values.get("head_dim") or 0, int)
        return given or self.int("hidden_size") // self.int("num_attention_heads")

    @property
    def rope(self) -> dict[str, Any]:
        """Return the rotary settings with `rope_theta` and `rope_type`.

        Both formats, of transformers 4 and 5, are read; values of 5 take precedence.
        """
        nested = self.values.get("rope_scaling") or self.values.get("rope_parameters") or {}
        if not isinstance(nested, dict):
            raise self.error("rope_scaling and rope_parameters are settings by name: copy the file again")
        if any(isinstance(value, dict) for value in nested.values()):
            raise self.error("rope_parameters of single kinds of layers are not supported")
        theta = self.values.get("rope_theta") or DEFAULT_ROPE_THETA
        rope_type = nested.get("rope_type", nested.get("type", "default"))
        return {
            **nested,
            "rope_theta": self._number("rope_theta", nested.get("rope_theta", theta), float),
            "rope_type": rope_type,
        }

    @property
    def quantization(self) -> dict[str, Any]:
        """Return the quantization_config; {} if the weights are not quantized."""
        return self.values.get(QUANTIZATION_CONFIG) or {}

    def check_quantization(self) -> None:
        """Raise an error unless the folder's weights are wide, blockwise FP8, MXFP4 or INT4 in groups of 32 columns."""
        method = self.quantization.get("quant_method")
        if self.quantization and method not in ("fp8", "mxfp4") and not _is_int4(self.quantization):
            raise self.error(
                f"its weights are quantized by {method!r} in a format that is not read: read are blockwise FP8 (fp8), "
                "MXFP4 of GPT-OSS (mxfp4) and INT4 with groups of 32 (compressed-tensors, pack-quantized): take the "
                "release in bfloat16 or FP8"
            )

    def check_positions(self, tokens: int, setting: str) -> None:
        """Raise an error if `tokens`, the value of `setting`, exceeds max_position_embeddings."""
        positions = self.int("max_position_embeddings")
        if tokens > positions:
            raise UserError(
                f"{setting} = {tokens}, but the model has only {positions} positions (max_position_embeddings of "
                f"{self.path / self.file}): lower it{self._longer()}"
            )

    def _longer(self) -> str:
        rope = self.rope
        if rope["rope_type"] != "yarn" or not rope.get("original_max_position_embeddings"):
            return ""
        reach = int(self.rope_float("factor") * self.rope_float("original_max_position_embeddings"))
        return f", or set max_position_embeddings to what the rope scaling reaches, {reach}"

    def rope_float(self, key: str) -> float:
        if self.rope.get(key) is None:
            raise self.error(f"{key} of the rope scaling is missing")
        return self._number(key, self.rope[key], float)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def int(self, *keys: str) -> int:
        """Return a required integer. `keys`: synonyms; contradicting values are an error."""
        given = {key: self._number(key, self.values[key], int) for key in keys if self.values.get(key) is not None}
        if len(set(given.values())) > 1:
            raise self.error(f"{' and '.join(f'{key}={value}' for key, value in given.items())} contradict each other")
        return next(iter(given.values())) if given else self._number(keys[0], self._require(keys[0]), int)

    def float(self, key: str) -> float:
        return self._number(key, self._require(key), float)

    def expect(self, key: str, *allowed: Any) -> None:
        """Raise an error unless the value of `key` is one of `allowed`; a missing key counts as `allowed[0]`."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise self.error(f"{key}={value!r} is not supported, only {choices}")

    def error(self, sentence: str) -> UserError:
        return UserError(f"{self.path / self.file}: {sentence}")

    def _number(self, key: str, value: Any, kind: type[Number]) -> Number:
        return read_number(kind, value, f"{self.path / self.file}: {key}")

    def _require(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise self.error(f"{key} is missing")
        return self.values[key]
