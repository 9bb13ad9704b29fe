"""Summary of a Hugging Face folder, from its config and the headers of its files."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.checkpoint.non_policy_tensors import check_layers
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param

TORCH_DIST = ".metadata"  # the file that makes a folder a torch_dist checkpoint


@dataclass(frozen=True)
class HfSummary:
    """What a folder has. Parameter counts: `stored` in files, `policy` of the mapping, `active` for one token."""

    architecture: str
    family: str
    stored: int
    policy: int
    active: int
    dtypes: dict[str, int]  # tensors by dtype
    shards: int
    bytes: int
    fp8: bool
    checksums: str

    def rows(self) -> dict[str, str]:
        """Return the summary as text for people."""
        dtypes = ", ".join(f"{name} x {count}" for name, count in self.dtypes.items())
        return {
            "format": "Hugging Face" + (", blockwise FP8" if self.fp8 else ""),
            "architecture": f"{self.architecture} (family {self.family})",
            "parameters": f"{self.stored:,} stored, {self.policy:,} of the policy, {self.active:,} active per token",
            "dtypes": dtypes,
            "shards": f"{self.shards} ({self.bytes:,} bytes)",
            "checksums": self.checksums,
        }


def is_torch_dist(folder: Path) -> bool:
    """Tell whether the folder, or its `policy` as in a run's checkpoints, is in Megatron's torch_dist format."""
    return (folder / TORCH_DIST).is_file() or (folder / "policy" / TORCH_DIST).is_file()


def describe_hf(folder: Path) -> HfSummary:
    """Summarise a folder from its headers; compare all files for which a conversion left checksums.

    Raises UserError for an unsupported architecture, for missing, torn or changed files, and for too many layers.
    """
    hf = HfConfig.read(folder)
    params = family_of(hf).params(hf).values()
    with HfReader(folder, verify=True) as reader:
        check_layers(reader.names, hf)
        reader.checksums.check_share()
        dtypes = Counter(str(reader.dtype(name)).removeprefix("torch.") for name in reader.stored_names)
        stored = sum(prod(reader.shape(name)) for name in reader.names)
        files = reader.files
    return HfSummary(
        architecture=", ".join(hf.get("architectures") or ["not named"]),
        family=hf.model_type,
        stored=stored,
        policy=count_parameters(params),
        active=count_parameters(params, int(hf.get("num_experts_per_tok") or 0)),
        dtypes=dict(sorted(dtypes.items())),
        shards=len(files),
        bytes=sum(file.stat().st_size for file in files),
        fp8="float8_e4m3fn" in dtypes,
        checksums=reader.checksums.summary,
    )


def count_parameters(params: Iterable[Param], experts_per_token: int | None = None) -> int:
    """Count the parameters of a model; with `experts_per_token`, those active for one token."""
    return sum(
        param.num_elements
        for param in params
        if not param.alias and (experts_per_token is None or param.expert is None or param.expert < experts_per_token)
    )
