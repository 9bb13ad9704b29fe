"""Tiny reward models made on the spot, and what transformers says of tokens."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification


def make_reward_model(folder: Path, tokenizer_of: Path, labels: int = 1) -> None:
    """A random classifier of two layers with the tokenizer and the vocabulary's size of a folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=AutoConfig.from_pretrained(tokenizer_of).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def expected_scores(folder: Path, sequences: Sequence[Sequence[int]]) -> list[float]:
    """The scores at the last token of each sequence, one sequence at a time."""
    reference = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = [reference.model(torch.tensor([list(tokens)])).last_hidden_state[0, -1] for tokens in sequences]
        return [reference.score(state).item() for state in hidden]
