"""What the answers of a sampling follow from: settings, weights and data. A folder holds the answers of one of them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from grpo_mp.checkpoint.run_state import METRICS, complete_checkpoints
from grpo_mp.config import Settings
from grpo_mp.models.folder_digest import model_digest
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import file_digest, write_json
from grpo_mp.utils.reading import read_json
from grpo_mp.utils.redact import has_secrets
from grpo_mp.utils.user_code import file_digests

FILE = "identity.json"
SECTIONS: dict[str, Any] = {
    "run": {"seed"},
    "model": {"family", "dtype"},
    "data": {"train", "source", "prompt_column", "answer_column", "system_prompt", "chat_template_kwargs"},
    "rollout": {
        *("group_size", "max_prompt_tokens", "max_response_tokens", "temperature", "top_p", "stop"),
        *("tools", "tool_args", "tool_environment", "tool_parser", "environment_factory"),
        *("function", "function_args", "limits", "failed"),
    },
    "engine": {"deterministic", "args", "speculative"},
    "reward": True,
}
# Of them what says where and how fast answers are computed and scored, not which they are.
NEUTRAL = re.compile(
    r"reward\..*(url|api_key_env|retries|gpus_per_server)"
    r"|reward(\.(model|judge|steps))?\.timeout_s"
    r"|rollout\.limits\.(tool_processes|episodes)"
    r"|engine\.args\.(mem_fraction_static|max_running_requests|max_total_tokens|chunked_prefill_size|log_level)"
)
DIFFERENCES = {
    "model": "the model's files differ",
    "prompts": "the prompts, or their answers, differ",
}


@dataclass(frozen=True)
class SamplingIdentity:
    """What decides the answers, and how they are scored; neither where they are computed nor which are kept."""

    settings: Mapping[str, Any]  # by dotted name
    model: str  # digest of its files
    data: Mapping[str, str]  # digest of each file, by its path; of users' code, too
    prompts: str  # digest of what was read of them

    @classmethod
    def of(cls, settings: Settings, model: Path, prompts: str) -> "SamplingIdentity":
        """Read what identifies a sampling by the weights in `model`, a folder or a checkpoint."""
        chosen = settings.model_dump(mode="json", include=SECTIONS)
        files = {Path(train_set.path) for train_set in settings.data.train.values()}
        data = {str(file): file_digest(file) for file in sorted(files) if file.is_file()}
        data |= file_digests(chosen)
        decisive = {name: value for name, value in _dotted(chosen) if not NEUTRAL.fullmatch(name)}
        return cls(decisive, model_digest(model), data, prompts)

    @property
    def settings_digest(self) -> str:
        """Return one text for all the settings."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.settings, sort_keys=True).encode())

    def write(self, folder: Path) -> None:
        """Write it into the folder of the answers."""
        values = asdict(self)
        write_json(folder / FILE, values, private=has_secrets(values))


def check_folder(folder: Path, identity: SamplingIdentity) -> None:
    """Raise UserError for a folder that holds a run, or answers that follow from anything else."""
    if (folder / METRICS).exists() or complete_checkpoints(folder):
        raise UserError(f"{folder} holds a training run: choose another --out")
    if not (folder / FILE).exists():
        return
    if difference := _difference(read_json(folder / FILE), asdict(identity)):
        raise UserError(f"{folder} holds answers of another sampling ({difference}): choose another --out, or move it")


def _difference(old: Any, new: Mapping[str, Any]) -> str:
    """Describe the first difference; "" where there is none."""
    before, now = dict(_dotted(old)), dict(_dotted(new))
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            kind, _, rest = name.partition(".")
            if kind == "settings":
                return f"{rest} was {before.get(name)!r}, is now {now.get(name)!r}"
            return DIFFERENCES.get(kind) or f"the file {rest} differs"
    return ""


def _dotted(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted name."""
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _dotted(value, f"{name}.{key}".removeprefix("."))
