"""Tensors of released folders that are no part of the policy: multi-token prediction and rotary tables.

They are carried unchanged: a conversion keeps them as safetensors files beside its parts, and an export takes them
from the folder that the policy was started from.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader, has_hf_weights
from grpo_mp.models.hf_config import HfConfig

NON_POLICY = "extra_"  # prefix of a conversion's files of them
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def is_non_policy_tensor(name: str, hf: HfConfig) -> bool:
    """Tell whether a tensor is no part of the policy."""
    layer = LAYER.match(name)
    return (layer is not None and int(layer.group(1)) >= hf.int("num_hidden_layers")) or name.endswith(".inv_freq")


def check_layers(names: Iterable[str], hf: HfConfig) -> None:
    """Raise UserError where there are more layers than config.json counts, multi-token prediction among them."""
    layers, mtp = hf.int("num_hidden_layers"), int(hf.get("num_nextn_predict_layers") or 0)
    excess = {int(layer[1]): name for name in names if (layer := LAYER.match(name)) and int(layer[1]) >= layers + mtp}
    if excess:
        raise hf.error(
            f"num_hidden_layers={layers} and num_nextn_predict_layers={mtp} do not cover {excess[min(excess)]}: set "
            "them as the weights have them"
        )


def open_non_policy_tensors(folder: Path, verify: bool = False) -> HfReader | None:
    """Open the tensors outside the policy in a Hugging Face or converted folder; None where it has none."""
    if has_hf_weights(folder):
        return HfReader(folder, verify=verify)
    files = sorted(folder.glob(f"{NON_POLICY}*.safetensors"))
    return HfReader(folder, files=files, verify=verify) if files else None


def read_non_policy_tensors(folder: Path, hf: HfConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values, FP8 dequantised, one at a time."""
    reader = open_non_policy_tensors(folder)
    if reader is None:
        return
    with reader:
        for name in sorted(name for name in reader.names if is_non_policy_tensor(name, hf)):
            yield name, reader.read(name)
