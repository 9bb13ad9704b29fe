"""Speculative decoding: what is refused, what SGLang is given, what is read of its replies."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_mp.config.sections import EngineConfig
from grpo_mp.errors import UserError
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.client import Capabilities, EngineClient, EngineOutput
from grpo_mp.rollout.engine_args import ENGINE_SITE, check_arguments, known_arguments
from grpo_mp.rollout.groups import joined
from grpo_mp.rollout.speculation import check_speculation, speculative_arguments


def engine(args: dict[str, Any] | None = None, **speculative: Any) -> EngineConfig:
    return EngineConfig.model_validate({"args": args or {}, "speculative": speculative})


@pytest.fixture
def hf(tmp_path: Path) -> HfConfig:
    """A folder with two layers and one that predicts the token after the next."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {f"model.layers.{layer}.norm.weight": torch.ones(1) for layer in range(3)}, tmp_path / "model.safetensors"
    )
    return HfConfig.read(tmp_path)


def test_drafting_that_fits_is_accepted(hf: HfConfig) -> None:
    for algorithm in ("none", "mtp", "ngram"):
        check_speculation(engine(algorithm=algorithm), hf, cpu=False)
    check_speculation(engine(), hf, cpu=True)


@pytest.mark.parametrize("algorithm", ["mtp", "ngram"])
def test_a_cpu_engine_would_not_sample(hf: HfConfig, algorithm: str) -> None:
    with pytest.raises(UserError, match=rf"algorithm={algorithm} needs a GPU: .* rollout.temperature .* set none"):
        check_speculation(engine(algorithm=algorithm), hf, cpu=True)


def test_n_grams_of_replicas_are_refused(hf: HfConfig) -> None:
    with pytest.raises(UserError, match="algorithm=ngram does not work with attention in replicas"):
        check_speculation(engine({"attn_dp_size": 2}, algorithm="ngram"), hf, cpu=False)


def test_a_layer_that_is_missing_is_refused(hf: HfConfig) -> None:
    def refused(sentence: str, config: HfConfig, args: dict[str, Any] | None = None) -> None:
        with pytest.raises(UserError, match=rf"algorithm=mtp {sentence}"):
            check_speculation(engine(args, algorithm="mtp"), config, cpu=False)

    refused("needs a multi-token-prediction layer", HfConfig(hf.path, hf.values | {"num_nextn_predict_layers": 0}))
    refused("needs the weights of the multi-token", HfConfig(hf.path, hf.values | {"num_hidden_layers": 3}))
    refused("reads the drafting layer from .* in the engine's precision", hf, {"quantization": "fp8"})
    (hf.path / "model.safetensors").unlink()
    refused("reads the drafting layer from", hf)


def test_what_the_settings_own_is_refused_in_engine_args() -> None:
    for algorithm in ("mtp", "ngram"):
        arguments = speculative_arguments(engine(algorithm=algorithm), group_size=8)
        assert set(arguments) <= known_arguments()
        names = [name for name in arguments if name.startswith("speculative")]
        for name in [*names, "speculative_accept_threshold_acc"]:
            with pytest.raises(UserError, match=f"engine.args.{name} cannot be set"):
                check_arguments([name], known_arguments())
    assert speculative_arguments(engine(), group_size=8) == {}


def test_a_chain_is_verified_with_one_token_more() -> None:
    assert engine(algorithm="mtp", num_steps=2).speculative.verified_tokens == 3
    assert engine(num_steps=2).speculative.verified_tokens == 1
    with pytest.raises(ValueError, match="num_steps=2 drafts is verified with num_draft_tokens=3"):
        engine(algorithm="mtp", num_steps=2, num_draft_tokens=4)


def test_verify_steps_are_read_and_added_where_a_response_goes_on() -> None:
    client = EngineClient(0, "http://127.0.0.1", {}, 1.0)
    meta = {"output_token_logprobs": [[-1.0, 5, None]] * 4, "finish_reason": None, "weight_version": "1"}
    reply = {"output_ids": [5] * 4, "meta_info": meta}
    plain, drafted = (
        client._parse_output(reply | {"meta_info": meta | more}, 3, None) for more in ({}, {"spec_verify_ct": 2})
    )
    assert (plain.verify_steps, drafted.verify_steps) == (0, 2)
    begun = EngineOutput((1,), (-1.0,), (0,), truncated=False, aborted=True, verify_steps=1)
    assert joined(begun, drafted).verify_steps == 3


class RecordingClient(EngineClient):
    """It keeps what it would send, and takes every request for answered."""

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        vars(self).setdefault("sent", {})[path] = body
        return {"success": True}


SELECT = """
import json, sys
from types import SimpleNamespace
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

manager = object.__new__(SchedulerWeightUpdaterManager)
manager.tp_worker = SimpleNamespace(weight_update_runners=lambda: ["target"])
manager.draft_worker = SimpleNamespace(weight_update_runners=lambda: ["draft"])
print(json.dumps([manager._select_runners(selector) for selector in sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("with_draft", [False, True])
def test_a_sync_reaches_the_layer_that_drafts_where_it_is_trained(with_draft: bool) -> None:
    """By SGLang's own choice of the models that a request is for: without a selector it would be for both."""

    client: Any = RecordingClient(0, "http://127.0.0.1", {}, 10.0)
    client._capabilities = Capabilities("0", weight_update_session=True, missing=())

    async def sync() -> None:
        await client.begin_weight_update(with_draft)
        await client.update_weights_from_tensor(["a"])
        await client.end_weight_update(3)

    asyncio.run(sync())
    sent = client.sent
    assert "selector" not in sent["/end_weight_update"]  # it is for those of the begin
    selectors = [sent[path]["selector"] for path in ("/begin_weight_update", "/update_weights_from_tensor")]
    environment = os.environ | {"PYTHONPATH": str(ENGINE_SITE)}
    command = [sys.executable, "-c", SELECT, *selectors]
    selected = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert json.loads(selected) == [["target", "draft"] if with_draft else ["target"]] * 2
