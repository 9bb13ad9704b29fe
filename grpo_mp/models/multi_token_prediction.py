"""The multi-token-prediction layer: behind the decoder's last, it predicts the token after the next one.

DeepSeek-V3, arXiv 2412.19437, 2.2: a projection of the normed hidden state beside the normed embedding of the next
token, a decoder layer, a norm, and the model's own embedding and output layer. In Hugging Face files it is the layer
after the last; here it has that number, too.
"""

from collections.abc import Mapping

from grpo_mp.models.blocks import HF_LAYER, MCORE_LAYER
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule

COPIED_EMBEDDING = "mtp.embedding.word_embeddings.weight"
# Tensors of its own that files have, and that are the model's: by the name of the model's.
COPIES = {"model.embed_tokens.weight": "embed_tokens.weight", "lm_head.weight": "shared_head.head.weight"}


def rules(hf: HfConfig) -> list[Rule]:
    """Map what the layer has beside a decoder layer, which the family's rules map with the decoder's; [] untrained.

    With pipeline parallelism the last stage keeps a copy of the embedding, as of a tied output layer.
    """
    if not hf.trains_mtp:
        return []
    hidden, layer = hf.int("hidden_size"), [hf.int("num_hidden_layers")]
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
    """Return whether a parameter is one of the layer, or its copy of the embedding."""
    return param.name == COPIED_EMBEDDING or (param.layer is not None and param.layer >= hf.int("num_hidden_layers"))


def engine_params(params: Mapping[str, Param], hf: HfConfig, drafts: bool) -> dict[str, Param]:
    """Return the parameters that engines hold: those of the layer where they draft with it."""
    return {name: param for name, param in params.items() if drafts or not is_of_mtp(param, hf)}


def copied_names(hf: HfConfig) -> dict[str, str]:
    """Return, by the name of a tensor of the model, that of its copy in the files of a layer that is trained."""
    layer = HF_LAYER.format(layer=hf.int("num_hidden_layers"))
    return {name: layer + copy for name, copy in COPIES.items()} if hf.trains_mtp else {}
