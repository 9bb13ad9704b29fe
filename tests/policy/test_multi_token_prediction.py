"""The loss and the acceptance of a multi-token-prediction layer by the formulas; models that it is refused for.

A checkpoint of a run that trains it, converted back to Hugging Face files.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_mp.batching.microbatches import MicroBatchPlan
from grpo_mp.batching.packing import pack, with_mtp_targets
from grpo_mp.checkpoint.convert import to_hf
from grpo_mp.config import check_settings
from grpo_mp.config.sections import LayoutConfig, ModelConfig, TrainingConfig
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.model_configs import published_config
from grpo_mp.policy.megatron_config import transformer_config
from grpo_mp.policy.multi_token_prediction import MtpLoss
from grpo_mp.policy.policy import Policy, check_policy
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch, Sample
from tests.parallel.full_model import file_tensors
from tests.planner.jobs import BASE
from tests.save_policy import save_policy
from tools.tiny.models import add_mtp_layer, make_tiny, make_tokenizer


def batch_of(sampled: torch.Tensor, p: torch.Tensor) -> MicroBatch:
    samples = [
        Sample(i, 0, (1,), (2, int(token)), (-0.5, float(p[token].log())), (0, 0), truncated=False)
        for i, token in enumerate(sampled)
    ]
    plan = MicroBatchPlan(tuple(range(len(samples))), (3,) * len(samples))
    return with_mtp_targets(pack(samples, [1.0] * len(samples), [0.5 / len(samples)] * len(samples), plan, 1))


def test_the_mean_of_the_least_of_1_and_q_over_p_is_the_chance_that_a_draft_is_accepted() -> None:
    """A draft x of q is accepted with min(1, p(x) / q(x)): by the definition, in float64."""
    p, q = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.1, 0.5, 0.15, 0.25]], dtype=torch.float64)
    accepted = float((q * (p / q).clamp(max=1)).sum())
    sampled = torch.tensor([0] * 4 + [1] * 2 + [2] * 2)  # as often as p says
    batch = batch_of(sampled, p)
    loss = MtpLoss(0.3)
    assert batch.mtp_targets is not None
    assert batch.mtp_weights is not None
    learned = batch.mtp_weights > 0
    assert batch.mtp_targets[learned].tolist() == sampled.tolist()
    logprobs = torch.full((batch.total_tokens,), float("nan"))  # what is not learned reaches nothing
    logprobs[learned] = q[sampled].log().float()
    logprobs.requires_grad_()
    value = loss(logprobs, batch)
    value.backward()
    cross_entropy = -float((p * q.log()).sum())
    assert float(value.detach()) == pytest.approx(0.3 * 0.5 * cross_entropy)
    assert logprobs.grad is not None
    assert logprobs.grad[learned].tolist() == pytest.approx([-0.3 * 0.5 / 8] * 8)
    assert not logprobs.grad[~learned].any()
    total, ratios, tokens = loss.take_sums().tolist()
    assert (total / tokens, ratios / tokens, tokens) == (pytest.approx(cross_entropy), pytest.approx(accepted), 8)
    assert loss.take_sums().tolist() == [0, 0, 0]


def test_what_is_learned_is_the_second_token_on_of_what_was_generated() -> None:
    given = (True, False, True, True, True)  # the second token was given
    first = Sample(0, 0, (7, 8), (10, 11, 12, 13, 14), (-1.0, -2.0, -3.0, -4.0, -5.0), (0,) * 5, False, generated=given)
    second = Sample(1, 0, (9,), (20,), (-6.0,), (0,), truncated=False)
    batch = with_mtp_targets(pack([first, second], [1.0, 1.0], [0.25, 0.5], MicroBatchPlan((0, 1), (8, 4)), 4))
    assert batch.mtp_weights is not None
    assert batch.mtp_targets is not None
    assert batch.mtp_rollout_logprobs is not None
    rows = batch.mtp_weights.nonzero()[:, 0]
    assert batch.targets[rows].tolist() == [12, 13]  # the next token, and the one after it
    assert batch.mtp_targets[rows].tolist() == [13, 14]
    assert batch.mtp_rollout_logprobs[rows].tolist() == [-4.0, -5.0]
    assert batch.mtp_weights[rows].tolist() == [0.25, 0.25]


def test_only_a_model_with_one_layer_trains_it(tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer(["apples"]))
    model = ModelConfig(path=tmp_path, mtp_loss_scaling_factor=0.1)
    with pytest.raises(UserError, match=r"num_nextn_predict_layers=0, and model.mtp_loss_scaling_factor trains one"):
        check_policy(model.read_config(), model, LayoutConfig(), TrainingConfig(), 1)
    for count in (2, None):
        hf = HfConfig.read(tmp_path, trains_mtp=True)
        hf = replace(hf, values=hf.values | {"num_nextn_predict_layers": count})
        with pytest.raises(UserError, match=rf"num_nextn_predict_layers={count or 0}, "):
            transformer_config(LayoutConfig(), TrainingConfig(), "float32", hf)


def test_qwen_counts_its_layer_by_another_key_or_not_at_all(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3_5_text", make_tokenizer(["apples"]))
    hf = HfConfig.read(tmp_path, trains_mtp=True)
    none, counted = (replace(hf, values=hf.values | {"mtp_num_hidden_layers": count}) for count in (0, 1))
    with pytest.raises(UserError, match=r"mtp_num_hidden_layers or num_nextn_predict_layers=0, and"):
        transformer_config(LayoutConfig(), TrainingConfig(), "float32", none)
    assert transformer_config(LayoutConfig(), TrainingConfig(), "float32", counted).mtp_num_layers == 1
    assert published_config("qwen3-next-80b-a3b").mtp_layers == 1
    kinds = {"full_attention_interval": 3, "layer_types": None}
    with pytest.raises(UserError, match=r"the last of layer_types is linear_attention"):
        transformer_config(LayoutConfig(), TrainingConfig(), "float32", replace(counted, values=counted.values | kinds))


@pytest.mark.parametrize(
    ("megatron_args", "values", "sentence"),
    [
        ({"pipeline_model_parallel_layout": "Ett|ttm|L"}, {}, "apart from the last decoder layers"),
        ({"pipeline_model_parallel_layout": "Ett|tt|L"}, {}, "apart from the last decoder layers"),
        ({}, {"tie_word_embeddings": True}, "tie_word_embeddings=true"),
    ],
)
def test_what_the_layer_cannot_do_is_refused_at_start(
    megatron_args: dict[str, Any], values: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer(["apples"]), num_nextn_predict_layers=1)
    hf = HfConfig.read(tmp_path, trains_mtp=True)
    hf = replace(hf, values=hf.values | values)
    training = TrainingConfig(megatron_args=megatron_args)
    with pytest.raises(UserError, match=sentence):
        transformer_config(LayoutConfig(pipeline=3 if megatron_args else 1), training, "float32", hf)


LISTED = [["embedding", "decoder", "decoder"], ["decoder", "decoder", "loss"]]


@pytest.mark.parametrize("given", ["Et*2|t*2L", "Ett|ttmL", LISTED])
def test_a_layout_of_the_pipeline_has_the_layer_before_the_loss(given: str | list[list[str]], tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer(["apples"]), num_nextn_predict_layers=1)
    hf = HfConfig.read(tmp_path, trains_mtp=True)
    training = TrainingConfig(megatron_args={"pipeline_model_parallel_layout": given})
    layout = transformer_config(LayoutConfig(pipeline=2), training, "float32", hf).pipeline_model_parallel_layout
    assert [kind.name for kind in layout.layout[-1][-1]] == ["decoder", "decoder", "mtp", "loss"]


LAYERS = {"deepseek_v3": "model.layers.2.", "qwen3_next": "mtp.", "qwen3_5_moe_text": "mtp."}
COPIES = {
    "model.embed_tokens.weight": "model.layers.2.embed_tokens.weight",
    "lm_head.weight": "model.layers.2.shared_head.head.weight",
}


def stack_experts(file: Path) -> None:
    """Store the layer's experts as some published folders do: gate and up, and down, of all experts in one tensor."""
    tensors = load_file(file)
    experts = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.layers.0.mlp.experts.")}
    gate, up, down = (
        torch.stack([experts[f"mtp.layers.0.mlp.experts.{i}.{part}_proj.weight"] for i in range(len(experts) // 3)])
        for part in ("gate", "up", "down")
    )
    stacked = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
    tensors |= {f"mtp.layers.0.mlp.experts.{part}": tensor for part, tensor in stacked.items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize(("trained", "fp8"), [(True, False), (True, True), (False, False)])
def test_the_layer_is_the_checkpoints_where_it_was_trained(
    parallel: Parallel, tmp_path: Path, trained: bool, fp8: bool, family: str
) -> None:
    """Every weight grows by 1; where the layer is not trained, it stays as it was in the folder."""
    model = tmp_path / "model"
    saved = tmp_path / "saved"
    counted = {"deepseek_v3": "num_nextn_predict_layers", "qwen3_5_moe_text": "mtp_num_hidden_layers"}
    counts = {counted[family]: 1} if family in counted else {}  # Qwen3-Next's config.json does not count its layer
    make_tiny(model, family, make_tokenizer(["apples"]), num_hidden_layers=2, **counts)
    add_mtp_layer(model)
    if family == "qwen3_5_moe_text":
        stack_experts(model / "model.safetensors")
    settings = {"path": model, "dtype": "float32", "mtp_loss_scaling_factor": 0.1 if trained else 0.0}
    policy = Policy(check_settings(BASE | {"model": settings}, "test"), parallel, with_reference=False)
    for tensor in policy.tensors.values():
        tensor.data.add_(1)
    saved.mkdir()
    save_policy(policy, saved)
    to_hf(saved, tmp_path / "back", model, fp8, lambda done, total: None)
    before = file_tensors(model)
    after = file_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    of_layer = [name for name in before if name.startswith(LAYERS[family])]
    assert len(of_layer) > len(COPIES)
    for name in before:
        grown = before[name] + (1 if trained or name not in of_layer else 0)
        torch.testing.assert_close(after[name].float(), grown, rtol=0.07 if fp8 else 0, atol=0)
    if trained and family == "deepseek_v3":
        assert all(torch.equal(after[name], after[copy]) for name, copy in COPIES.items())
