"""Run a model folder in transformers, in the policy and in an engine, and say where they part."""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from grpo_mp import platform
from grpo_mp.doctor.activations import run_engine, run_policy, run_transformers
from grpo_mp.doctor.model import diagnose_model
from grpo_mp.doctor.weights import (
    check_engine_weights,
    check_policy_weights,
    fp8_tensors,
    hf_tensors,
    params_of,
    write_folder,
)
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_layout import is_fp8_checkpoint
from grpo_mp.utils.findings import Finding

FP8 = "fp8"


def compare_models(folder: Path, tokens: Tensor, precision: str, without: Collection[str] = ()) -> list[Finding]:
    """Return what is found on tokens [sequences, length] in a precision: float32, bfloat16 or fp8.

    `without`: "policy" or "engine", which is left out.
    """
    dtype = "bfloat16" if precision == FP8 else precision
    hf = HfConfig.read(folder)
    layers = hf.int("num_hidden_layers")
    reference = run_transformers(folder, tokens, torch.float32)
    same = None if dtype == "float32" else run_transformers(folder, tokens, getattr(torch, dtype))
    findings = list[Finding]()
    with tempfile.TemporaryDirectory(prefix="grpo_mp_doctor_") as scratch:
        export, params = None, params_of(folder)
        if "policy" not in without:
            is_compared = "engine" not in without and precision != FP8 and not is_fp8_checkpoint(hf)
            export = Path(scratch, "export") if is_compared else None

            def examine(tensors: Mapping[str, Tensor]) -> None:
                findings.append(check_policy_weights(folder, tensors, params))
                if export:
                    write_folder(export, ((name, t.cpu()) for name, t in hf_tensors(tensors, params)), folder)

            policy = run_policy(folder, tokens, dtype, examine)
            findings += diagnose_model("policy", policy, reference=reference, same_precision=same, layers=layers)
        if "engine" not in without:
            engine_folder = folder
            if precision == FP8:
                engine_folder, rounded = fp8_folders(folder, Path(scratch))
                same = run_transformers(rounded, tokens, torch.bfloat16)
            engine, checksums = run_engine(engine_folder, tokens, dtype, export)
            findings += diagnose_model("engine", engine, reference=reference, same_precision=same, layers=layers)
            if checksums:
                findings.append(check_engine_weights(checksums.loaded, checksums.exported))
    return findings


def fp8_folders(folder: Path, scratch: Path) -> tuple[Path, Path]:
    """Write what an engine reads for FP8, and the same weights in bfloat16; on a CPU they are one folder."""
    rounded = write_folder(scratch / "rounded", fp8_tensors(folder, torch.bfloat16), folder)
    if not platform.on_cuda():
        return rounded, rounded
    return write_folder(scratch / "fp8", fp8_tensors(folder, None), folder, fp8=True), rounded
