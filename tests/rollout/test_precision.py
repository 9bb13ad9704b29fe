"""Engines in blockwise FP8: what SGLang makes of the arguments, and what is refused."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from grpo_mp.checkpoint.hf_writer import FP8_CONFIG
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_args import ENGINE_SITE
from grpo_mp.rollout.engine_layout import OVERRIDES, engine_uses_fp8, precision_arguments
from grpo_mp.utils.errors import UserError
from tools.tiny.models import make_tiny, make_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, HfConfig]:
    """One folder of wide weights, and one whose config says blockwise FP8."""
    folders = {}
    for fp8 in (False, True):
        folder = tmp_path_factory.mktemp("fp8" if fp8 else "wide")
        make_tiny(folder, "qwen3_moe", make_tokenizer(["apples"]), num_hidden_layers=1)
        if fp8:
            config = json.loads((folder / "config.json").read_text()) | {"quantization_config": FP8_CONFIG}
            (folder / "config.json").write_text(json.dumps(config))
        folders[fp8] = HfConfig.read(folder)
    return folders


READ_CONFIGS = """
import json, sys
from sglang.srt.configs.model_config import ModelConfig
requests = json.loads(sys.argv[1])
configs = [ModelConfig(folder, model_override_args=overrides).hf_config.to_dict() for folder, overrides in requests]
print(json.dumps([[config.get("quantization_config"), config["rope_theta"]] for config in configs]))
"""
CASES: list[tuple[bool, dict[str, Any], bool, bool]] = [  # folder in FP8, engine.args, on a CPU -> engine in FP8
    (False, {}, False, False),
    (False, {"quantization": "fp8"}, False, True),
    (True, {}, False, True),
    (True, {"quantization": "fp8"}, False, True),
    (True, {}, True, False),
    (False, {}, True, False),
]


def test_sglang_reads_the_intended_precision(folders: dict[bool, HfConfig]) -> None:
    user = {OVERRIDES: '{"rope_theta": 7.0}'}
    args_of_cases = [user | precision_arguments(user | args, folders[fp8], cpu) for fp8, args, cpu, _ in CASES]
    requests = [
        [str(folders[case[0]].path), arguments[OVERRIDES]] for case, arguments in zip(CASES, args_of_cases, strict=True)
    ]
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ENGINE_SITE)}
    command = [sys.executable, "-P", "-W", "ignore", "-c", READ_CONFIGS, json.dumps(requests)]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout.splitlines()[-1])
    for (folder_fp8, args, cpu, expected), arguments, (quantized, theta) in zip(
        CASES, args_of_cases, results, strict=True
    ):
        assert engine_uses_fp8(args, folders[folder_fp8], cpu) == expected
        assert (quantized or {}).get("weight_block_size") == ([128, 128] if expected else None)
        assert theta == 7.0
        assert (arguments != user) == (expected != folder_fp8)


def test_unsupported_precision_is_refused(folders: dict[bool, HfConfig]) -> None:
    with pytest.raises(UserError, match=r"^engine\.args\.quantization=awq: weights are sent as they are trained or in"):
        engine_uses_fp8({"quantization": "awq"}, folders[False], cpu=False)
    with pytest.raises(UserError, match=r"engines compute in FP8 on GPUs only: leave it out"):
        engine_uses_fp8({"quantization": "fp8"}, folders[False], cpu=True)
