"""Speculative decoding: what SGLang is started with, and what cannot be. Pure, except for names read from a folder.

SGLang verifies drafted tokens so that each follows the model's own distribution, and returns the logprobs of the model
that verified: log_softmax(logits / temperature), as without speculation (`compute_spec_logprobs`).
"""

from typing import Any

from grpo_mp.checkpoint.hf_reader import LAYER, HfReader, has_hf_weights
from grpo_mp.config.sections import EngineConfig
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_parallelism import attention_replicas
from grpo_mp.rollout.precision import precision_arguments
from grpo_mp.utils.errors import UserError


def speculative_arguments(engine: EngineConfig, group_size: int) -> dict[str, Any]:
    """Return the ServerArgs of `engine.speculative`.

    The layer that drafts need not be trained: it is read from the model's folder even where the other weights come with
    the first sync, and the host keeps a copy for engines that leave the device. Its embedding and head are the model's.
    """
    speculative = engine.speculative
    if speculative.algorithm == "none":
        return {}
    drafting = {
        "mtp": {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": speculative.num_steps,
            "speculative_eagle_topk": speculative.eagle_topk,
            "speculative_draft_load_format": "auto",
            "enable_draft_weights_cpu_backup": True,
        },
        "ngram": {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": speculative.eagle_topk},
    }
    return {
        "speculative_num_draft_tokens": speculative.verified_tokens,
        # With speculation SGLang would lower its own default to 48.
        "max_running_requests": engine.args.get("max_running_requests", engine.concurrent_groups * group_size),
        **drafting[speculative.algorithm],
    }


def check_speculation(engine: EngineConfig, hf: HfConfig, cpu: bool) -> None:
    """Raise UserError where SGLang cannot draft so, or would sample from another distribution than the model's."""
    algorithm = engine.speculative.algorithm
    if algorithm == "none":
        return
    reason = None
    if cpu:
        reason = "needs a GPU: on a CPU SGLang accepts the most probable tokens, whatever rollout.temperature says"
    elif algorithm == "ngram" and attention_replicas(engine.args) > 1:
        reason = "does not work with attention in replicas: SGLang's n-grams are those of one process"
    elif algorithm == "mtp":
        reason = _missing_draft(engine, hf)
    if reason:
        raise UserError(f"engine.speculative.algorithm={algorithm} {reason}: change that, or set none")


def _missing_draft(engine: EngineConfig, hf: HfConfig) -> str | None:
    if not hf.get("num_nextn_predict_layers"):
        return f"needs a multi-token-prediction layer, and {hf.path} counts none (num_nextn_predict_layers)"
    if not has_hf_weights(hf.path) or precision_arguments(engine.args, hf, cpu=False):
        return f"reads the drafting layer from {hf.path}, which must hold weights in the engine's precision"
    with HfReader(hf.path) as reader:
        layers = {int(layer[1]) for name in reader.names if (layer := LAYER.match(name))}
    if hf.int("num_hidden_layers") not in layers:
        return f"needs the weights of the multi-token-prediction layer, which {hf.path} lacks"
    return None
