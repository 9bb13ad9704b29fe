"""A server beside the job loads an export: from then on its logprobs are those of the exported weights."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.config.sections import ExportServers
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.trainer.export_servers import load_export
from tests.rollout.conftest import Logprobs

Ask = Callable[[Callable[[EngineClient], Awaitable[Any]]], Any]
KEY = "OPPONENT_KEY"


@pytest.mark.slow
def test_a_server_plays_the_exported_version(
    engine: EngineProcess,
    ask: Ask,
    model_folder: Path,
    other_folder: Path,
    expected_logprobs: Logprobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEY, engine.api_key)
    tokens = [5, 9, 20, 31, 7]

    def check(folder: Path) -> None:
        (found,) = ask(lambda client: client.score([tokens]))
        expected = expected_logprobs(folder, tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert found == pytest.approx(expected.tolist(), abs=1e-4)

    dead = "http://127.0.0.1:9"
    servers = ExportServers(urls=(dead, engine.url), api_key_env=KEY)
    try:
        (sentence,) = load_export(servers, other_folder)
        assert sentence.startswith(f"run.export_servers: {dead} does not load {other_folder}: no answer (ConnectError")
        check(other_folder)
    finally:
        load_export(servers, model_folder)
    check(model_folder)
    _, refused = load_export(servers, other_folder / "none")
    assert f"{engine.url} does not load {other_folder / 'none'}: status 400: " in refused
    check(model_folder)
