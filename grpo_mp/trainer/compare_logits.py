"""Compare the logits of two model folders: Hugging Face folders run in transformers, converted ones in Megatron."""

from math import ceil
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from grpo_mp.checkpoint.converted_reader import open_weights
from grpo_mp.checkpoint.describe import count_parameters
from grpo_mp.checkpoint.hf_reader import HfReader, has_hf_weights
from grpo_mp.checkpoint.hf_writer import QUANTIZATION_CONFIG
from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.distributed.process_groups import single_rank_environment, start_parallel, stop_parallel
from grpo_mp.errors import UserError
from grpo_mp.models.families import TRANSFORMERS_NAMES, family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.phases import GIB
from grpo_mp.policy.forward import sequence_logits
from grpo_mp.policy.megatron_config import transformer_config
from grpo_mp.policy.model import build_chunks
from grpo_mp.policy.weights import load_hf, local_tensors

SEQUENCES, LENGTH = 4, 32
WEIGHT_COPIES = 2  # as read, and in the model
TIMEOUT_S = 600.0  # of the process group of one rank


@torch.no_grad()
def compare_logits(reference: Path, other: Path, seed: int = 0) -> float:
    """Return the largest difference of float32 logits on random tokens, relative to the largest of `reference`.

    One model is loaded at a time. Raises UserError where one does not fit the memory, or where the vocabularies differ.
    """
    sizes = {folder: HfConfig.read(folder).int("vocab_size") for folder in (reference, other)}
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"{reference} and {other} have {sizes[reference]} and {sizes[other]} tokens: they are different models"
        )
    for folder in sizes:
        hf, free = HfConfig.read(folder), psutil.virtual_memory().available
        needed = WEIGHT_COPIES * 4 * count_parameters(family_of(hf).params(hf).values())
        if needed > free:
            raise UserError(
                f"{folder}: running it takes {ceil(needed / GIB)} GiB in float32 and {free // GIB} GiB are free: "
                "compare without --logits, or on a larger machine"
            )
    tokens = torch.randint(sizes[reference], (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))
    expected, logits = (
        _run_transformers(folder, tokens) if has_hf_weights(folder) else _run_megatron(folder, tokens)
        for folder in (reference, other)
    )
    return float((logits - expected).abs().max() / expected.abs().max())


def _run_transformers(folder: Path, tokens: Tensor) -> Tensor:
    """Compute float32 logits [B, T, V] of tokens [B, T], as `_run_megatron` does."""
    values = {key: value for key, value in HfConfig.read(folder).values.items() if key != QUANTIZATION_CONFIG}
    model_type = values.pop("model_type")
    config = AutoConfig.for_model(TRANSFORMERS_NAMES.get(model_type, model_type), **values)
    with HfReader(folder, dequantize_to=torch.float32, verify=True) as reader:
        state = {name: reader.read(name).float() for name in reader.names}
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, experts_implementation="eager"
    )
    del state
    logits: Tensor = model.eval()(tokens).logits
    return logits


def _run_megatron(folder: Path, tokens: Tensor) -> Tensor:
    hf, layout, training = HfConfig.read(folder), LayoutConfig(), TrainingConfig()
    params = family_of(hf).params(hf)
    with single_rank_environment():
        parallel = start_parallel(layout, 0, TIMEOUT_S)
        try:
            config = transformer_config(layout, training, "float32", hf)
            (model,) = build_chunks(config, hf, training, temperature=1.0)
            tensors = local_tensors([model], params, parallel.coords, 1)
            with open_weights(folder, verify=True) as reader:
                load_hf(tensors, params, reader, parallel.coords, layout)
            return torch.stack([sequence_logits(model, row)[:, : hf.int("vocab_size")] for row in tokens])
        finally:
            stop_parallel()
