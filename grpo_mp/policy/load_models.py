"""Load a model folder into this process, in transformers or in Megatron, to compare their outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.checkpoint.stacked_experts import stack_experts
from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.distributed.process_groups import single_rank_environment, start_parallel, stop_parallel
from grpo_mp.models.families import TRANSFORMERS_NAMES, family_of
from grpo_mp.models.hf_config import QUANTIZATION_CONFIG, HfConfig
from grpo_mp.policy.megatron_config import transformer_config
from grpo_mp.policy.model import build_chunks
from grpo_mp.policy.weights import load_hf, local_tensors

TIMEOUT_S = 600.0  # of the process group of one rank


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load a Hugging Face folder in transformers; FP8, INT4 and MXFP4 weights are dequantized first."""
    hf = HfConfig.read(folder)
    values = {key: value for key, value in hf.values.items() if key != QUANTIZATION_CONFIG}
    model_type = values.pop("model_type")
    config = AutoConfig.for_model(TRANSFORMERS_NAMES.get(model_type, model_type), **values)
    with HfReader(folder, dequantize_to=torch.float32) as reader:
        state = {name: reader.read(name).float() for name in reader.names}
    if family_of(hf).stacks_experts:
        state = dict(stack_experts(state.items(), family_of(hf).config(hf)["num_moe_experts"]))
    model: nn.Module = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, experts_implementation="eager"
    )
    return model.eval()


@contextmanager
def policy_tensors(folder: Path, dtype: str = "float32") -> Iterator[tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Yield the unsharded Megatron model of a Hugging Face folder, for `sequence_logits`, and its tensors by name."""
    hf = HfConfig.read(folder)
    layout = LayoutConfig()
    training = TrainingConfig()
    params = family_of(hf).params(hf)
    with single_rank_environment():
        parallel = start_parallel(layout, 0, TIMEOUT_S)
        try:
            config = transformer_config(layout, training, dtype, hf)
            (model,) = build_chunks(config, hf, training, temperature=1.0)
            tensors = local_tensors([model], params, parallel.coords, 1)
            with HfReader(folder) as reader:
                load_hf(tensors, params, reader=reader, coords=parallel.coords, layout=layout)
            yield model, tensors
        finally:
            stop_parallel()
