"""What peft computes with exported adapters: logits, merged weights, the gradient of the formula in transformers."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.parallel.expected import FILE_NAMES, Expected, sample_loss


def load(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def load_peft(model: Path, adapters: Path) -> PeftModel:
    return PeftModel.from_pretrained(load(model), adapters, is_trainable=True).eval()


def logits(model: torch.nn.Module, sequence: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        values: Tensor = model(torch.tensor([sequence])).logits[0]
    return values


def gradient(model: PeftModel, expected: Expected) -> dict[str, Tensor]:
    """Of the adapters, by the names in the folder, for the first update."""
    update = expected.given.first_update
    losses = [sample_loss(model, expected.given.samples[i], expected.given.advantages[i]) for i in update]
    (torch.stack(losses).sum() / len(update)).backward()
    learned = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    names = FILE_NAMES.get(model.config.model_type, {})
    experts = next((getattr(model.config, key) for key in EXPERTS if hasattr(model.config, key)), 0)
    by_file: dict[str, Tensor] = {}
    for name, tensor in learned.items():
        short = name.removeprefix("base_model.model.").replace(".default", "")
        assert tensor.grad is not None, f"{name} has none"
        by_file |= dict(_of_file(short, tensor.grad, experts, in_turn=model.config.model_type == "gpt_oss"))
    return {".".join(names.get(part, part) for part in name.split(".")): one for name, one in by_file.items()}


EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def _of_file(name: str, gradient: Tensor, experts: int, in_turn: bool) -> Iterator[tuple[str, Tensor]]:
    """Return the adapter of each expert from the common adapter of a layer.

    Gate and up share an adapter; its B is block diagonal, or has the rows of gate and up in turn.
    """
    layer, found, rest = name.partition(".experts.")
    if not found:
        yield name, gradient
        return
    parts = ("gate_proj", "up_proj") if rest.startswith("base_layer.") else ("down_proj",)
    kind = rest.removeprefix("base_layer.").removesuffix(".weight")
    if kind == "lora_A":
        by_expert = gradient.unflatten(0, (experts, len(parts), -1))
        pieces = {(expert, part): by_expert[expert, part] for expert in range(experts) for part in range(len(parts))}
    else:
        by_expert = gradient.unflatten(1, (len(parts), -1, experts))
        by_row = by_expert.unflatten(0, (-1, len(parts))).transpose(0, 1)
        by_expert = by_row if in_turn else by_expert.unflatten(0, (len(parts), -1))
        pieces = {
            (expert, part): by_expert[part, :, part, :, expert]
            for expert in range(experts)
            for part in range(len(parts))
        }
    for (expert, part), piece in pieces.items():
        yield f"{layer}.experts.{expert}.{parts[part]}.{kind}.weight", piece


def merged_state(model: PeftModel) -> Mapping[str, Tensor]:
    """All weights, the adapters added by peft."""
    state: Mapping[str, Tensor] = model.merge_and_unload().state_dict()
    return state
