"""Multi-token-prediction layer: after the last decoder layer, it predicts the token after the next one.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): a projection of [normed embedding of the next token, normed hidden state],
a decoder layer, a norm, and the model's own embedding and output layer. Its layer number is `num_hidden_layers`, here
and in Hugging Face files, except those of Qwen, where the layer is the module `mtp`.
"""

from collections.abc import Mapping

from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule

COPIED_EMBEDDING = "mtp.embedding.word_embeddings.weight"
# Hugging Face files store copies of the model's embedding and output layer: model's name -> name in the layer.
COPIES = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}
MODULE = "mtp."  # first part of the names of the layer's tensors in Qwen's files
# First parts of names in the layer -> of names in files. The last entry is the decoder layer.
QWEN_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "shared_head.norm.": "mtp.norm.",
    "": "mtp.layers.0.",
}
HY3_NAMES = {"shared_head.norm.": HF_LAYER + "final_layernorm."}


def rules(hf: HfConfig) -> list[Rule]:
    """Map the layer's norms and projection; [] if the layer is not trained.

    The family's own rules map the decoder layer inside it. With pipeline parallelism the last stage keeps a copy of the
    embedding, as for a tied output layer.
    """
    if not hf.trains_mtp:
        return []
    hidden = hf.int("hidden_size")
    layer = [hf.int("num_hidden_layers")]
    norms = {"enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
    return [
        *(
            Rule(f"{MCORE_LAYER}{name}.weight", (f"{HF_LAYER}{hf_name}.weight",), ((hidden,),), layers=layer)
            for name, hf_name in norms.items()
        ),
        Rule(
            MCORE_LAYER + "eh_proj.weight",
            (HF_LAYER + "eh_proj.weight",),
            ((hidden, 2 * hidden),),
            tp_dim=0,
            layers=layer,
        ),
        Rule(
            COPIED_EMBEDDING,
            ("model.embed_tokens.weight",),
            ((hf.int("vocab_size"), hidden),),
            tp_dim=0,
            vocabulary=True,
            alias=True,
        ),
    ]


def is_of_mtp(param: Param, hf: HfConfig) -> bool:
    """Return whether a parameter belongs to the layer, or is its copy of the embedding."""
    return param.name == COPIED_EMBEDDING or (param.layer is not None and param.layer >= hf.int("num_hidden_layers"))


def engine_params(params: Mapping[str, Param], hf: HfConfig, drafts: bool) -> dict[str, Param]:
    """Return the parameters that engines hold. `drafts`: the engines draft with the layer and hold it too."""
    return {name: param for name, param in params.items() if drafts or not is_of_mtp(param, hf)}


def copied_names(hf: HfConfig) -> dict[str, str]:
    """Map names of the model's tensors to the names of their copies in a trained layer; empty without such a layer."""
    layer = HF_LAYER.format(layer=hf.int("num_hidden_layers"))
    return {name: layer + copy for name, copy in COPIES.items()} if hf.trains_mtp else {}
