"""Which of SGLang's kernels give a token the same bits in any company, on GPUs. Pure."""

from collections.abc import Mapping
from typing import Any

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError, did_you_mean

# Of SGLang 0.5.23: those whose kernels do not depend on the batch, and those that keep that with a cached prefix or
# with latent attention.
INVARIANT = ("fa3", "fa4", "flashinfer", "triton")
INVARIANT_WITH_CACHE = ("fa3", "fa4", "triton")
BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def check_determinism(args: Mapping[str, Any], hf: HfConfig, cpu: bool) -> None:
    """Raise UserError for attention of `engine.args` that differs in company; SGLang looks at one of the three.

    On a CPU there is one attention, which does not.
    """
    if cpu:
        return
    latent = bool(hf.get("kv_lora_rank"))
    allowed = INVARIANT_WITH_CACHE if latent else INVARIANT
    for name in BACKENDS:
        backend = args.get(name)
        if backend is not None and backend not in allowed:
            of = " with latent attention" if latent else ""
            raise UserError(
                f"engine.args.{name}={backend}: with engine.deterministic=true the kernels of a GPU must not depend on "
                f"the batch: set one of {', '.join(allowed)}{of}, or leave it out{did_you_mean(str(backend), allowed)}"
            )
