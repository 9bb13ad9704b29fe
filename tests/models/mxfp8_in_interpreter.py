"""Compare the scales of MXFP8 with those of SGLang's kernel, in Triton's interpreter.

Only scales: the interpreter rounds ties of float8 away from zero, and 127 to 64. test_fp8 runs this file in a process
of its own, because Triton reads TRITON_INTERPRET=1 on import.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import torch

from grpo_mp.models.mxfp8 import quantize
from grpo_mp.rollout.sglang_source import source_folder


def test_scales_equal_those_of_sglang() -> None:
    file = source_folder().parent / "kernels" / "ops" / "quantization" / "mxfp8_quant.py"
    spec = spec_from_file_location("mxfp8_quant", file)
    assert spec
    assert spec.loader
    sys.modules["mxfp8_quant"] = kernels = module_from_spec(spec)  # Triton looks a kernel's module up there
    spec.loader.exec_module(kernels)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(192, 160, generator=generator) * torch.logspace(-6, 6, 192)[:, None]
    # Exactly 448 times a power of two
    weight[5, 32:64] = 56.0
    weight[6, :32] = 0.875
    for dtype in (torch.bfloat16, torch.float32):
        _, scale = quantize(weight.to(dtype))
        assert torch.equal(scale, kernels.to_mxfp8(weight.to(dtype)).scale)
