"""Speculative decoding: what is refused, what SGLang is given, what is read of its replies."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from grpo_mp.config.sections import EngineConfig
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.model_configs import published_config
from grpo_mp.rollout.client import EngineClient, EngineOutput
from grpo_mp.rollout.engine_args import ENGINE_SITE, check_speculation
from grpo_mp.rollout.groups import joined
from grpo_mp.utils.errors import UserError
from tests.rollout.checksums import checksums


def engine(args: dict[str, Any] | None = None, **speculative: Any) -> EngineConfig:
    return EngineConfig.model_validate({"args": args or {}, "speculative": speculative})


@pytest.fixture
def hf(tmp_path: Path) -> HfConfig:
    """A folder with two layers and one that predicts the token after the next."""
    config = published_config("glm-4.5-air").values | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {f"model.layers.{layer}.norm.weight": torch.ones(1) for layer in range(3)}, tmp_path / "model.safetensors"
    )
    return HfConfig.read(tmp_path)


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

    check_speculation(engine(algorithm="mtp"), hf, cpu=False)
    refused("needs a multi-token-prediction layer", HfConfig(hf.path, hf.values | {"num_nextn_predict_layers": 0}))
    refused("needs the weights of the multi-token", HfConfig(hf.path, hf.values | {"num_hidden_layers": 3}))
    refused("reads the drafting layer from .* in the engine's precision", hf, {"quantization": "fp8"})
    next_config = published_config("qwen3-next-80b-a3b").values
    refused("needs the weights of the multi-token", HfConfig(hf.path, next_config))
    save_file({"mtp.fc.weight": torch.ones(1)}, hf.path / "model.safetensors")
    check_speculation(engine(algorithm="mtp"), HfConfig(hf.path, next_config), cpu=False)
    (hf.path / "model.safetensors").unlink()
    refused("reads the drafting layer from", hf)


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
    """Records its requests, and answers them by `replies`, then by success."""

    def __init__(self, replies: Iterable[Any] = ()) -> None:
        super().__init__(0, "http://127.0.0.1", {}, 10.0)
        self.sent = list[tuple[str, dict[str, Any]]]()
        self._replies = iter(replies)

    async def _request(self, method: str, path: str, body: Any = None, *_: Any, **__: Any) -> httpx.Response:
        self.sent.append((path, body or {}))
        return httpx.Response(200, json=next(self._replies, {"success": True, "ranks": []}))


# SGLang's own choice of models, and its own checksums, of two models that hold a tensor of one name.
SELECT = """
import json, sys
from types import SimpleNamespace
import msgspec, torch
from sglang.srt.managers.io_struct import CheckWeightsReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.utils.weight_checker import WeightChecker

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
models = {role: torch.nn.Linear(2, 2, bias=False).requires_grad_(False) for role in ("target", "draft")}

def worker(role):
    checker = object.__new__(WeightChecker)
    checker._get_model = lambda: models[role]
    checker._placement = dict.fromkeys(("tp_rank", "tp_size", "dp_rank", "dp_size", "pp_rank", "pp_size"), 0)
    runner = SimpleNamespace(check_weights=checker.handle)
    return SimpleNamespace(weight_update_runners=lambda: [(role, runner)])

manager = object.__new__(SchedulerWeightUpdaterManager)
manager.tp_cpu_group = None
manager.tp_worker, manager.draft_worker = worker("target"), worker("draft")
answers = []
for body in map(json.loads, sys.argv[1:]):
    if "action" in body:
        reply = manager.check_weights(CheckWeightsReqInput(**body))
        answers.append({"success": reply.success, "ranks": msgspec.to_builtins(reply.payload)})
    else:
        answers.append([role for role, _ in manager._select_runners(body["selector"])])
print(json.dumps(answers))
"""


def answers_of_sglang(bodies: Iterable[dict[str, Any]]) -> list[Any]:
    environment = os.environ | {"PYTHONPATH": str(ENGINE_SITE)}
    command = [sys.executable, "-c", SELECT, *map(json.dumps, bodies)]
    return list(json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout))


@pytest.mark.slow
def test_a_sync_and_its_check_reach_the_layer_that_drafts_where_it_is_trained() -> None:
    """By SGLang's own choice of the models that a request is for: without a selector it would be for both."""

    async def sync(client: RecordingClient, with_draft: bool) -> None:
        await client.begin_weight_update(with_draft)
        await client.update_weights_from_tensor(["a"])
        await client.end_weight_update(3)

    bodies = []
    for with_draft in (False, True):
        syncing = RecordingClient()
        checking = RecordingClient()
        asyncio.run(sync(syncing, with_draft))
        asyncio.run(checksums(checking, with_draft))
        sent = dict(syncing.sent)
        assert "selector" not in sent["/end_weight_update"]  # it is for those of the begin
        bodies += [sent[path] for path in ("/begin_weight_update", "/update_weights_from_tensor")]
        bodies += [body for _, body in checking.sent]
    answers = iter(answers_of_sglang(bodies))
    for with_draft, roles in ((False, ["target"]), (True, ["target", "draft"])):
        assert [next(answers), next(answers)] == [roles] * 2
        found = asyncio.run(checksums(RecordingClient(answers), with_draft))
        assert list(found) == ["weight", "draft.weight"][: len(roles)]
        assert len(set(found.values())) == len(roles)
