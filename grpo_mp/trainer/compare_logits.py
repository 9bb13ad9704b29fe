"""Compare the logits of two models: transformers runs Hugging Face folders, Megatron runs converted folders."""

from pathlib import Path

import torch
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import has_hf_weights
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.forward import sequence_logits
from grpo_mp.policy.load_models import check_memory, policy_model, transformers_model
from grpo_mp.utils.errors import UserError

SEQUENCES, LENGTH = 4, 32


@torch.no_grad()
def compare_logits(reference: Path, other: Path, seed: int = 0) -> float:
    """Return max |other - reference| / max |reference| of the float32 logits on random tokens."""
    sizes = {folder: HfConfig.read(folder).int("vocab_size") for folder in (reference, other)}
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"{reference} and {other} have {sizes[reference]} and {sizes[other]} tokens: they are different models"
        )
    for folder in sizes:
        check_memory(folder, "compare without --logits, or on a larger machine")
    tokens = torch.randint(sizes[reference], (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))
    expected, logits = (
        _run_transformers(folder, tokens) if has_hf_weights(folder) else _run_megatron(folder, tokens)
        for folder in (reference, other)
    )
    return float((logits - expected).abs().max() / expected.abs().max())


def _run_transformers(folder: Path, tokens: Tensor) -> Tensor:
    logits: Tensor = transformers_model(folder)(tokens).logits
    return logits


def _run_megatron(folder: Path, tokens: Tensor) -> Tensor:
    vocab_size = HfConfig.read(folder).int("vocab_size")
    with policy_model(folder) as model:
        return torch.stack([sequence_logits(model, row)[:, :vocab_size] for row in tokens])
