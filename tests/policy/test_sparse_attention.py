"""Sparse attention: dense where an indexer may choose all keys, indexers that stay as they are, stages, versions."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_mp.batching.microbatches import MicroBatchPlan
from grpo_mp.batching.packing import pack
from grpo_mp.config.sections import LayoutConfig, LoraConfig, ModelConfig, TrainingConfig
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.sparse_attention import INDEXER_LOSS
from grpo_mp.policy.forward import forward_only, sequence_logits
from grpo_mp.policy.load_models import policy_tensors, transformers_model
from grpo_mp.policy.policy import check_policy
from grpo_mp.policy.routing_replay import RoutingReplay
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import ReplayedChoices, Sample
from tests.checkpoint.helpers import policy_of
from tests.parallel.inputs import with_keys
from tests.sparse_attention import IS_COMPUTED, needs_megatron
from tools.tiny.models import PUBLISHED_KEYS, make_tiny, make_tokenizer

TOKENS = torch.arange(1, 61)
MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    def make(family: str, **shape: Any) -> Path:
        folder = tmp_path / f"{family}_{len(list(tmp_path.iterdir()))}"
        make_tiny(folder, family, make_tokenizer(["apples"]), hidden_size=64, initializer_range=0.1, **shape)
        return folder

    return make


def without_indexers(folder: Path) -> Path:
    """Make a DeepSeek-V3 of the same weights."""
    file = folder / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if ".indexer." not in n}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | PUBLISHED_KEYS["deepseek_v3"]
    changed = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    with policy_tensors(folder) as (model, _):
        return sequence_logits(model, TOKENS)


@needs_megatron
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_with_as_many_keys_as_tokens_it_is_deepseek_v3(family: str, make_model: MakeModel) -> None:
    dense = logits_of(without_indexers(make_model(family)))
    all_keys = logits_of(make_model(family, index_topk=len(TOKENS)))
    some = logits_of(make_model(family, index_topk=16))
    scale = dense.abs().max()
    assert (all_keys - dense).abs().max() <= 2e-6 * scale
    by_token = (some - dense).abs().amax(1) / scale
    assert by_token[:16].max() <= 2e-6
    assert by_token[17:].min() > 1e-4


@needs_megatron
def test_replayed_keys_are_those_of_transformers(make_model: MakeModel) -> None:
    """Two packed samples; transformers' indexers return the same random keys."""
    folder = make_model("glm_moe_dsa", index_topk=16)
    hf = HfConfig.read(folder)
    shape = model_shape(hf)
    indexer = shape.indexer
    assert indexer is not None
    draw = np.random.default_rng(0)
    samples = [
        Sample.from_tokens(i, draw.integers(1, 60, 5).tolist(), draw.integers(1, 60, length).tolist())
        for i, length in enumerate((40, 25))
    ]
    lengths = tuple(sample.total_tokens for sample in samples)
    keys = [with_keys(np.zeros((length, 1, 1)), indexer, seed=i)["keys"] for i, length in enumerate(lengths)]
    expected = [
        logprobs_with_keys(folder, (*sample.prompt_tokens, *sample.tokens), of_sample, sorted(indexer.layers))
        for sample, of_sample in zip(samples, keys, strict=True)
    ]
    batch = pack(samples, [0.0] * 2, [0.0] * 2, MicroBatchPlan((0, 1), lengths), align=1)
    rows = [range(start, start + length - indexer.topk) for start, length in ((16, 45), (45 + 16, 30))]
    ranges = torch.tensor([[each.start, len(each)] for each in rows], dtype=torch.int32)
    ids = torch.from_numpy(np.concatenate([of_sample[indexer.topk :] for of_sample in keys]))
    with policy_tensors(folder) as (model, _):
        replay = RoutingReplay([model], hf.int("n_routed_experts"), with_keys=True)
        no_experts = torch.empty(0, len(replay.layers), shape.experts_per_token, dtype=torch.uint8)
        no_rows = torch.empty(0, 2, dtype=torch.int32)
        replayed = replace(batch, routed_experts=ReplayedChoices(no_rows, no_experts, ReplayedChoices(ranges, ids)))
        with_own, with_given = (forward_only([model], [each], replay)[0][0] for each in (batch, replayed))
    given = torch.cat([part[4 : length - 1] for part, length in zip(with_given.split(lengths), lengths, strict=True)])
    own = torch.cat([part[4 : length - 1] for part, length in zip(with_own.split(lengths), lengths, strict=True)])
    actual = torch.cat([part[4:] for part in expected])
    assert (given - actual).abs().max() <= 1e-5
    assert (own - actual).abs().max() > 1e-3


@torch.no_grad()
def logprobs_with_keys(folder: Path, tokens: Sequence[int], keys: np.ndarray, layers: Sequence[int]) -> torch.Tensor:
    """Compute logprobs [T - 1] in transformers, where indexers return `keys` [T, layers, top-k] unless they are -1."""
    model = transformers_model(folder, torch.float32)
    for number, layer in enumerate(layers):
        given = torch.from_numpy(keys[:, number])

        def replace_keys(_: Any, __: Any, chosen: torch.Tensor, given: torch.Tensor = given) -> torch.Tensor:
            return torch.where(given[None] >= 0, given[None].to(chosen.dtype), chosen)

        model.model.layers[layer].self_attn.indexer.register_forward_hook(replace_keys)
    logits = model(torch.tensor([list(tokens)])).logits[0]
    return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


@needs_megatron
def test_the_loss_of_indexers_is_the_published_one(make_model: MakeModel) -> None:
    """Equation 4 of arXiv 2512.02556 with the attention of transformers, over the tokens of a response."""
    folder = make_model("deepseek_v32", index_topk=16)
    tokens = np.random.default_rng(0).integers(1, 60, 50).tolist()
    response = slice(19, 49)  # positions that predict it
    losses, gradients = indexer_losses(folder, tokens, response)
    sample = Sample.from_tokens(0, tokens[:20], tokens[20:])
    batch = pack([sample], [0.0], [1.0], MicroBatchPlan((0,), (64,)), align=1)
    with policy_of(folder, "float32", megatron_args={INDEXER_LOSS: 0.25}) as policy:
        assert policy.indexer_loss
        policy.compute_gradients([batch], lambda logprobs, entropy, _: (0 * logprobs.sum(), None))
        for name, param in policy.params.items():
            if ".indexer." in name:
                expected = 0.25 * gradients[param.hf[0]]
                actual = policy.tensors[name].main_grad  # type: ignore[attr-defined]
                assert (actual - expected).norm() <= 1e-4 * expected.norm()
        assert policy.indexer_loss.take_metrics()["train/indexer_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert policy.indexer_loss.take_metrics() == {"train/indexer_loss": 0.0}


def indexer_losses(folder: Path, tokens: Sequence[int], queries: slice) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of `queries` in each layer's indexer, in float64, and the gradient of their sum by name."""
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    indexers = [layer.self_attn.indexer for layer in model.model.layers]
    seen = list[tuple[Any, Tensor]]()
    for indexer in indexers:
        indexer.register_forward_hook(lambda _, given, chosen: seen.append((given, chosen[0].long())))
    with torch.no_grad():
        attentions = model(torch.tensor([tokens]), output_attentions=True).attentions
    losses = list[Tensor]()
    for indexer, ((hidden, latents, (cos, sin), *_), chosen), attention in zip(indexers, seen, attentions, strict=True):
        query = indexer.wq_b(latents).view(1, len(tokens), indexer.n_heads, -1)
        key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
        width = indexer.qk_rope_head_dim
        rotated = apply_rotary_pos_emb(query[..., :width], key[..., :width], cos, sin, unsqueeze_dim=2)
        query = torch.cat((rotated[0], query[..., width:]), -1)[0]
        key = torch.cat((rotated[1], key[..., width:]), -1)[0, :, 0]
        weights = indexer.weights_proj(hidden)[0] * (indexer.n_heads * indexer.head_dim) ** -0.5
        scores = (weights[:, :, None] * torch.relu(query @ key.T)).sum(1)
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True).tril()
        predicted = scores.masked_fill(~is_chosen, -torch.inf).log_softmax(-1)
        target = attention[0].mean(0)
        terms = target * (target.clamp(min=1e-10).log() - predicted)
        losses.append(terms.masked_fill(~is_chosen, 0.0).sum(-1)[queries].mean())
    torch.stack(losses).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if ".indexer." in name}
    return torch.stack(losses).detach(), gradients


@needs_megatron
def test_only_indexers_are_frozen(make_model: MakeModel) -> None:
    with policy_tensors(make_model("glm_moe_dsa")) as (_, tensors):
        frozen = {name for name, tensor in tensors.items() if tensor.is_leaf and not tensor.requires_grad}
    indexers = {name for name in tensors if ".indexer." in name}
    biases = {name for name in tensors if name.endswith("expert_bias")}
    assert len(indexers) == 2 * 5
    assert frozen == indexers | biases


@needs_megatron
def test_norms_of_indexers_stay_in_float32_in_a_policy_of_bfloat16(make_model: MakeModel) -> None:
    folder = make_model("deepseek_v32", num_hidden_layers=2)
    files = load_file(folder / "model.safetensors")
    with policy_of(folder, "bfloat16") as policy:
        norms = [name for name in policy.tensors if ".indexer.k_norm." in name]
        assert len(norms) == 2 * 2
        for name in norms:
            assert torch.equal(policy.tensors[name].detach(), files[policy.params[name].hf[0]])
        others = {tensor.dtype for name, tensor in policy.tensors.items() if name not in norms and "bias" not in name}
        assert others == {torch.bfloat16}
        assert sequence_logits(policy.models()[0], TOKENS).isfinite().all()


def test_fp8_releases_have_two_matrices_of_an_indexer_in_fp8(make_model: MakeModel) -> None:
    hf = HfConfig.read(make_model("deepseek_v32", num_hidden_layers=2))
    params = [param for param in family_of(hf).params(hf).values() if ".indexer." in param.name]
    in_fp8 = {param.hf[0].rpartition("indexer.")[2] for param in params if param.in_fp8 == (True,)}
    assert in_fp8 == {"wq_b.weight", "wk.weight"}


def refused(folder: Path, training: TrainingConfig | None = None, lora: LoraConfig | None = None, **sizes: int) -> str:
    layout = LayoutConfig(**sizes)
    model = ModelConfig(path=folder, dtype="float32", lora=lora)
    with pytest.raises(UserError) as raised:
        check_policy(HfConfig.read(folder), model, layout, training or TrainingConfig(), layout.model_parallel)
    return str(raised.value)


def test_a_stage_cannot_start_with_a_layer_without_an_indexer(make_model: MakeModel) -> None:
    folder = make_model("glm_moe_dsa")
    sentence = refused(folder, pipeline=2, virtual_pipeline=2)
    assert "pipeline stage 1 begins with layer 1, which has no indexer" in sentence
    assert "begin stages with layers 0, 2 by training.megatron_args.pipeline_model_parallel_layout" in sentence
    uneven = TrainingConfig(megatron_args={"pipeline_model_parallel_layout": "Et|tttL"})
    assert "pipeline stage 1 begins with layer 1," in refused(folder, uneven, pipeline=2)
    if IS_COMPUTED:
        even = TrainingConfig(megatron_args={"pipeline_model_parallel_layout": "Ett|ttL"})
        model = ModelConfig(path=folder, dtype="float32")
        check_policy(HfConfig.read(folder), model, LayoutConfig(pipeline=2), even, 2)


def test_what_sparse_attention_does_not_compute(make_model: MakeModel) -> None:
    folder = make_model("deepseek_v32")
    shared = refused(folder, TrainingConfig(share_prompts=True))
    assert "training.share_prompts=true: in deepseek_v32 sparse attention chooses keys in each sequence" in shared
    if IS_COMPUTED:
        trains = TrainingConfig(megatron_args={INDEXER_LOSS: 0.1})
        assert "which deepseek_v3 has not: leave it out" in refused(
            without_indexers(make_model("deepseek_v32")), trains
        )
        lora = LoraConfig(rank=2, alpha=4.0)
        assert "which adapters leave as they are: leave it out" in refused(folder, trains, lora)
    else:
        assert "deepseek_v32 needs megatron-core 0.19 or newer for its sparse attention" in refused(folder)
