"""Tiny reward models made on the spot, and what transformers says of tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer


def make_reward_model(folder: Path, tokenizer_of: Path, labels: int = 1, family: str = "llama") -> None:
    """A random classifier of two layers with the tokenizer and the vocabulary's size of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=AutoConfig.from_pretrained(tokenizer_of).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def change_weights(folder: Path, remove: Sequence[str] = (), add: Mapping[str, Tensor] | None = None) -> None:
    """Remove tensors from a folder's file, and add others."""
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in remove}
    save_file(tensors | dict(add or {}), file, {"format": "pt"})


def expected_scores(folder: Path, sequences: Sequence[Sequence[int]]) -> list[float]:
    """The scores at the last token of each sequence, one sequence at a time."""
    reference = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = [reference.model(torch.tensor([list(tokens)])).last_hidden_state[0, -1] for tokens in sequences]
        return [reference.score(state).item() for state in hidden]
