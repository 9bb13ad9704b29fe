"""A Hugging Face config.json, read strictly: a missing key is an error that names the file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mp.utils.errors import Number, UserError, read_number
from grpo_mp.utils.reading import read_json, refuse_unreadable, shorten

DEFAULT_ROPE_THETA = 10000.0  # where a file leaves rope_theta out
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("vocab_size", "num_experts_per_tok", "decoder_sparse_step"),
)
# The largest are some times those of any model that exists: what is made by layer and expert ends in time.
RANGES = {
    **dict.fromkeys(SIZES, (1, 2**24)),
    "max_position_embeddings": (1, 2**40),
    "num_hidden_layers": (1, 2**10),
    **dict.fromkeys(EXPERTS, (1, 2**13)),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"), (0, 2**10)),
    **dict.fromkeys(("n_group", "topk_group"), (0, 2**13)),
}
POSITIVE = ("rms_norm_eps", "routed_scaling_factor", "rope_theta", "partial_rotary_factor")
ROPE_NUMBERS = ("factor", "beta_fast", "beta_slow", "mscale", "original_max_position_embeddings", "rope_theta")
KINDS: dict[tuple[str, ...], type] = {
    ("rope_scaling", "rope_parameters", "quantization_config"): dict,
    ("architectures", "mlp_only_layers"): list,
    ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "mlp_bias", "use_qk_norm"): bool,
    ("model_type", "hidden_act", "topk_method", "scoring_func"): str,
}


@dataclass(frozen=True)
class HfConfig:
    """The plain contents of config.json; `path` is the folder it came from."""

    path: Path
    values: dict[str, Any]
    family: str | None = None  # name or path of its model family; None: by model_type
    file: str = "config.json"
    trains_mtp: bool = False  # the multi-token-prediction layer is part of the policy

    @classmethod
    def read(
        cls, folder: Path, family: str | None = None, name: str = "config.json", trains_mtp: bool = False
    ) -> "HfConfig":
        """Read a folder's config.json; raises UserError where it is missing or not a JSON object."""
        file = folder / name
        with refuse_unreadable(folder):
            is_there = file.exists()
        if not is_there:
            raise UserError(f"{file} does not exist: {_how_to_get(folder)}")
        values = read_json(file)
        if not isinstance(values, dict):
            raise UserError(f"{file}: expected an object of settings, found {type(values).__name__}: copy it again")
        hf = cls(folder, values, family, name, trains_mtp)
        hf.check_values()
        return hf

    def check_values(self) -> None:
        """Raise UserError where a value that is there has another type than it must have, or is out of its range."""
        for key, (lowest, highest) in RANGES.items():
            if self.values.get(key) is not None and not lowest <= self._number(key, self.values[key], int) <= highest:
                raise self.error(f"{key}={self.values[key]} is not from {lowest} to {highest}: copy the file again")
        for key in POSITIVE:
            if self.values.get(key) is not None and self._number(key, self.values[key], float) <= 0:
                raise self.error(f"{key}={self.values[key]} is not above 0: copy the file again")
        for keys, kind in KINDS.items():
            for key in keys:
                if not isinstance(self.values.get(key), kind | None):
                    raise self.error(f"{key}={shorten(repr(self.values[key]))} is no {kind.__name__}")
        for key, value in self.rope.items():
            if isinstance(value, str) == (key not in ("type", "rope_type")) or isinstance(value, list):
                raise self.error(f"{key}={shorten(repr(value))} of the rope scaling is not supported")
            if key in ROPE_NUMBERS and value is not None and self._number(key, value, float) <= 0:
                raise self.error(f"{key}={value} of the rope scaling is not above 0: copy the file again")
        chosen = self.values.get("num_experts_per_tok")
        experts = next((self.int(key) for key in EXPERTS if self.values.get(key) is not None), None)
        if chosen is not None and experts is not None and int(chosen) > experts:
            raise self.error(f"num_experts_per_tok={chosen} is more than the {experts} experts: copy the file again")
        for token in _numbers_in(self.values.get("eos_token_id")):
            if not 0 <= self._number("eos_token_id", token, int) < int(self.values.get("vocab_size") or token + 1):
                raise self.error(f"eos_token_id={token} is no token: vocab_size is {self.values['vocab_size']}")

    @property
    def model_type(self) -> str:
        """Return `model_type`, 'None' where it is missing."""
        return str(self.values.get("model_type"))

    @property
    def tied(self) -> bool:
        """Return whether embedding and output layer share their weights."""
        return bool(self.values.get("tie_word_embeddings", False))

    @property
    def policy_layers(self) -> int:
        """Return the layers of the policy: those of the decoder, and behind them one that predicts a token more.

        Raises UserError where the latter is to be trained and the model has none, or several.
        """
        layers = self.int("num_hidden_layers")
        if not self.trains_mtp:
            return layers
        if self.tied:
            raise self.error("tie_word_embeddings=true: set model.mtp_loss_scaling_factor to 0")
        if (count := int(self.get("num_nextn_predict_layers") or 0)) != 1:
            raise self.error(
                f"num_nextn_predict_layers={count}, and model.mtp_loss_scaling_factor trains one "
                "multi-token-prediction layer: set it to 0"
            )
        return layers + 1

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


def _how_to_get(folder: Path) -> str:
    """Return what to do about a model folder that is not there."""
    if folder.is_dir():
        return "give a Hugging Face folder or a converted checkpoint"
    is_hub_name = len(folder.parts) == 2 and not folder.parent.is_dir() and not folder.is_absolute()
    name, target = (folder.as_posix(), f"checkpoints/{folder.name}") if is_hub_name else ("OWNER/NAME", str(folder))
    return (
        f"download the model (hf download {name} --local-dir {target}) and give its folder; `grpo-mp plan CONFIG` and "
        "`grpo-mp launch CONFIG --dry-run` do without it"
    )


def _numbers_in(value: Any) -> list[Any]:
    """Return a value that may be a list, or missing, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def check_positions(hf: HfConfig, tokens: int, setting: str) -> None:
    """Raise UserError where a model has no position for each of so many tokens, which `setting` asks for."""
    positions = hf.int("max_position_embeddings")
    if tokens > positions:
        raise UserError(
            f"{setting} = {tokens}, but the model has only {positions} positions (max_position_embeddings of "
            f"{hf.path / hf.file}): lower it"
        )
