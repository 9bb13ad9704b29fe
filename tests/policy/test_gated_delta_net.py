"""A document behind others in a packed batch has the outputs and gradients that it has alone, wherever it begins."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_mp.config import check_settings
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.policy.shared_prompt_attention import packed_sequences
from tests.planner.jobs import BASE
from tools.tiny.models import make_tiny, make_tokenizer

HIDDEN = 32
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def layer(parallel: Parallel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The gated delta net of a policy's first layer."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, "qwen3_5_text", make_tokenizer(["apples"]), num_hidden_layers=2, hidden_size=HIDDEN)
    tree = BASE | {"model": {"path": folder, "dtype": "float32"}}
    policy = Policy(check_settings(tree, "test"), parallel, with_reference=False)
    return policy.models()[0].decoder.layers[0].self_attention


def outputs_and_gradients(layer: Any, hidden: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, H] of packed documents, and the gradients of the sum of their squares for `hidden`."""
    leaf = hidden.clone().requires_grad_()
    packing = packed_sequences(lengths, torch.device("cpu"))
    output = layer(leaf[:, None], None, packed_seq_params=packing)[0][:, 0]
    (gradient,) = torch.autograd.grad(output.square().sum(), leaf)
    return output.detach(), gradient


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 150), min_size=2, max_size=5).map(tuple), seed=st.integers(0, 99))
def test_documents_do_not_see_each_other(layer: Any, lengths: tuple[int, ...], seed: int) -> None:
    """Chunks of the delta rule have 64 tokens; the convolution reads three tokens back."""
    hidden = torch.randn(sum(lengths), HIDDEN, generator=torch.Generator().manual_seed(seed))
    packed = zip(*(tensor.split(lengths) for tensor in outputs_and_gradients(layer, hidden, lengths)), strict=True)
    for document, found in zip(hidden.split(lengths), packed, strict=True):
        for tensor, alone in zip(found, outputs_and_gradients(layer, document, (len(document),)), strict=True):
            assert (tensor - alone).abs().max() <= TOLERANCE * alone.abs().max()
