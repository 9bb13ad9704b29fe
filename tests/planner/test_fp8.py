"""Plans of training in FP8, with numbers written out for a dense and a sparse model."""

import pytest

from grpo_mp.planner.resource_use import logprob_use, train_use
from tests.planner.jobs import job_of

IN_FP8 = {"training": {"fp8_format": "e4m3"}}
QKV, OUT, MLP = 3584 * (3584 + 2 * 512), 3584 * 3584, 3 * 3584 * 18944  # of qwen2.5-7b
LAYER = QKV + OUT + MLP


def test_products_of_linear_layers_are_in_fp8_and_others_not() -> None:
    plain, fp8 = job_of("qwen2.5-7b", "h100-80", 1), job_of("qwen2.5-7b", "h100-80", 1, **IN_FP8)
    before, after = logprob_use(plain, 1.0), logprob_use(fp8, 1.0)
    assert after.flops + after.fp8_flops == pytest.approx(before.flops, rel=0.01)  # more padding
    tokens = fp8.settings.samples_per_step * fp8.mean_seq_len * fp8.packing.load_factor / 8
    assert after.fp8_flops == pytest.approx(2 * 28 * LAYER * tokens)
    trained = train_use(fp8)
    assert trained.fp8_flops == pytest.approx(3 * after.fp8_flops)
    assert before.fp8_flops == 0
