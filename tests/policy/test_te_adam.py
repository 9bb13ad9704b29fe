"""What is added to TransformerEngine's Adam, with an optimizer of its calls: the real one needs a GPU."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.optimizer import MegatronOptimizer

from grpo_mp.policy.te_adam import as_remainders, init_state, keeps_remainders


class Adam(torch.optim.Optimizer):
    """State of transformer_engine.pytorch.optimizers.FusedAdam (2.20.2): names, arguments, dtypes."""

    def __init__(self, params: list[torch.Tensor], store_param_remainders: bool) -> None:
        super().__init__(params, {})
        self.store_param_remainders = store_param_remainders

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        main = torch.zeros_like(param, dtype=torch.int16) if store_param_remainders else param.float()
        self.state[param] |= {"exp_avg": torch.zeros_like(param), "master_param": main}


def part(dtype: torch.dtype, remainders: bool) -> MegatronOptimizer:
    adam = Adam([torch.nn.Parameter(torch.ones(3, dtype=dtype))], remainders)
    config = SimpleNamespace(use_precision_aware_optimizer=True)
    return cast(MegatronOptimizer, SimpleNamespace(optimizer=adam, config=config))


@pytest.mark.parametrize(
    ("dtype", "remainders", "kept"),
    [
        (torch.bfloat16, True, torch.int16),
        (torch.bfloat16, False, torch.float32),
        (torch.float32, True, torch.float32),
    ],
)
def test_every_state_is_made_once_as_its_parameter_is_kept(
    dtype: torch.dtype, remainders: bool, kept: torch.dtype
) -> None:
    one = part(dtype, remainders)
    init_state(one)
    ((param, state),) = one.optimizer.state.items()
    assert state["master_param"].dtype == kept
    state["exp_avg"].fill_(7)
    init_state(one)
    assert one.optimizer.state[param]["exp_avg"].tolist() == [7, 7, 7]
    assert keeps_remainders([one]) == (kept == torch.int16)


def test_remainders_come_back_from_float32_as_they_were() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    saved: dict[int, dict[str, Any]] = {0: {"param": every.float(), "exp_avg": torch.ones(2)}}
    read = as_remainders(saved)
    assert torch.equal(read[0]["param"], every)
    assert read[0]["exp_avg"].dtype == torch.float32
