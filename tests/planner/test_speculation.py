"""Speculative decoding in a plan, against sums written out for DeepSeek-R1 on 16 GPUs."""

from dataclasses import replace

import pytest

from grpo_mp.distributed.coordinates import communicators
from grpo_mp.distributed.layout import model_shape
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.engine_memory import engine_memory
from grpo_mp.planner.engine_use import accepted_tokens, generation_use, prefill_flops, sync_use
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.model_configs import published_config
from grpo_mp.planner.resource_use import active_parameters, mtp_flops_per_token, train_use
from tests.planner.jobs import job_of, settings_of
from tests.planner.meta_model import built_on_meta

GPUS = 16
HIDDEN = 7168
LAYERS = 61
MTP = {"algorithm": "mtp", "num_steps": 3}


def r1(speculative: dict[str, object] | None = None, schedule: str = "colocated") -> PlannedJob:
    engine = {"gpus_per_engine": GPUS, "args": {"ep_size": GPUS}, "speculative": speculative or {}}
    return job_of("deepseek-r1", "h200-141", 2, schedule, engine=engine)


def test_the_layer_that_drafts_is_one_layer_and_a_projection() -> None:
    engine = engine_memory(r1(MTP))
    plain = engine_memory(r1())
    heads = 128 * (1536 * (128 + 64) + 512 * (128 + 128) + 128 * HIDDEN)  # q_b, kv_b, o
    divided = heads + 3 * HIDDEN * 2048 + 256 * 3 * HIDDEN * 2048  # shared expert, routed experts
    whole = HIDDEN * (1536 + 512 + 64) + HIDDEN * 256 + 2 * HIDDEN * HIDDEN  # q_a, kv_a, router, eh_proj
    assert engine.draft_weights == pytest.approx(2 * (divided / GPUS + whole), rel=1e-4)
    assert engine.weights == plain.weights
    assert engine.draft_kv_cache == pytest.approx(engine.kv_cache / LAYERS)
    both = engine.kv_cache + engine.draft_kv_cache
    assert both + engine.draft_weights == pytest.approx(plain.kv_cache)
    assert engine.kv_cache_tokens == int(both / (576 * 2 * (LAYERS + 1)))
    assert engine_memory(r1({"algorithm": "ngram"})) == plain


def test_what_a_step_yields() -> None:
    assert accepted_tokens(r1()) == 1
    assert accepted_tokens(r1(MTP)) == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)
    assert accepted_tokens(r1({"algorithm": "ngram"})) == 1
    plain, ngram = (generation_use(job, engine_memory(job)) for job in (r1(), r1({"algorithm": "ngram"})))
    prefill = prefill_flops(r1(), 128 * r1().prompt_tokens)
    assert ngram.flops - prefill == pytest.approx(4 * (plain.flops - prefill))  # a step computes 4 tokens


def test_a_layer_that_learns_costs_the_trainer_and_not_the_engines() -> None:
    """Forward and backward passes compute a layer, its projection and the head once more; engines that draft get it."""

    def job(factor: float, **speculative: object) -> PlannedJob:
        engine = {"gpus_per_engine": GPUS, "args": {"ep_size": GPUS}, "speculative": speculative}
        layout = {"tensor": 4, "expert": 8, "pipeline": 2}
        learned = {"mtp_loss_scaling_factor": factor}
        placed = {"megatron_args": {"num_layers_in_last_pipeline_stage": 30}}
        sections = {"engine": engine, "layout": layout, "model": learned, "training": placed}
        return job_of("deepseek-r1", "h200-141", 2, **sections)

    plain = job(0.0)
    trained = job(0.1)
    drafting = job(0.1, **MTP)
    assert engine_memory(trained) == engine_memory(plain)
    head = HIDDEN * 129280
    active = active_parameters(plain.model, plain.hf)
    latent = HIDDEN * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * HIDDEN
    added = latent + (8 + 1) * 3 * HIDDEN * 2048 + 256 * HIDDEN + 2 * HIDDEN**2 + head
    attention = 128 * (192 + 128) * plain.attention_context  # FLOPs of a layer's scores and values, of half the context
    scores = 128 * 192 * plain.attention_context  # once more in a backward pass
    wait = 2 * (OVERHEADS.expert_wait - 1) * 58 * 8 * 3 * HIDDEN * 2048  # for the busiest of the routed experts
    ahead = 3 * (2 * added + attention + wait / 58) + scores
    ratio = ahead / (3 * (2 * active + LAYERS * attention + wait) + LAYERS * scores)
    assert train_use(trained).flops / train_use(plain).flops == pytest.approx(1 + ratio, rel=1e-6)
    assert train_use(trained).bubble < train_use(plain).bubble  # 31 and 30 + 1 layers, where it was 31 and 30
    assert sync_use(trained).nvlink_bytes == sync_use(plain).nvlink_bytes
    assert sync_use(drafting).nvlink_bytes > 1.01 * sync_use(job(0.0, **MTP)).nvlink_bytes
    groups = [communicators(each.settings.layout, 16, True, each.hf.trains_mtp) for each in (plain, trained)]
    assert {group.group for group in groups[1]} - {group.group for group in groups[0]} == {"EMBEDDING_GROUP"}


def test_the_layer_that_predicts_ahead_has_attention_where_most_layers_have_none() -> None:
    hf = replace(published_config("qwen3.5-35b-a3b"), trains_mtp=True)
    with built_on_meta(settings_of(layout={"expert": 32}), hf, world_size=32, rank=0) as (model,):  # 8 of 256 experts
        matrices = [weight for weight in model.mtp.parameters() if weight.dim() == 2]
    head = 2048 * 248320
    attention = 16 * (256 + 256) * 1000
    expected = 2 * (sum(weight.numel() for weight in matrices) + head) + attention
    assert mtp_flops_per_token(model_shape(hf), hf, 1000) == expected
