"""What optimizer.megatron becomes in Megatron's configs."""

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from grpo_mp.errors import UserError
from grpo_mp.policy.megatron_config import check_overrides, overrides_for
from tests.planner.jobs import settings_of


def test_what_is_no_dtype_is_refused() -> None:
    settings = settings_of(optimizer={"lr": 1e-6, "megatron": {"exp_avg_dtype": "bf17"}})
    with pytest.raises(UserError, match=r"optimizer\.megatron.exp_avg_dtype: 'bf17' is no dtype"):
        check_overrides(settings)


def test_a_dtype_is_written_by_its_name() -> None:
    megatron = {"exp_avg_dtype": "bfloat16", "clip_grad": 2.0, "moe_permute_fusion": True}
    settings = settings_of(optimizer={"lr": 1e-6, "megatron": megatron})
    assert overrides_for(settings, OptimizerConfig) == {"exp_avg_dtype": torch.bfloat16, "clip_grad": 2.0}
