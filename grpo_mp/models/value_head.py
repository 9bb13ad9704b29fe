"""Models with a head of one value: a critic's, which is that of a policy's family, and those of reward models."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule, Shape, expand
from grpo_mp.utils.errors import UserError

VALUE_HEAD = "output_layer.weight"  # Megatron's name
STORED_HEAD = "score.weight"  # that of transformers' models for sequence classification, as reward models are
OTHER_HEADS = ("v_head.", "value_head.", "score.")  # of TRL's language models with a value, of heads with two layers
CLASSIFIER = "ForSequenceClassification"


def classifier_name(hf: HfConfig) -> str | None:
    """Return the architecture by which a folder's config.json says that it has a head; None: a language model."""
    return next((str(name) for name in hf.get("architectures") or [] if CLASSIFIER in str(name)), None)


def check_head(
    names: Collection[str],
    shape_of: Callable[[str], Shape],
    head: Mapping[str, Shape],
    where: str,
    architecture: str | None,
    remedy: str,
) -> None:
    """Refuse weights that lack a part of the head `head`, or whose head has several values."""
    for name, shape in head.items():
        if name not in names:  # lost or renamed
            raise UserError(
                f"{where}: its config.json names {architecture}, but no weights file there holds the head {name}: "
                f"{remedy}"
            )
        if shape_of(name) != shape:
            raise UserError(
                f"{where}: its {name} has shape {list(shape_of(name))}, and a head of one value has {list(shape)}: "
                "take a model with one label"
            )


def critic_config(hf: HfConfig) -> HfConfig:
    """Return the config of the critic in a policy's or reward model's folder: untied, without tokens ahead."""
    names = [str(name).replace(CLASSIFIER, "ForCausalLM") for name in hf.get("architectures") or []]
    values = hf.values | {"tie_word_embeddings": False, "architectures": names}
    return replace(hf, values=values, trains_mtp=False)


def critic_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping's rules for a critic; `hf`: of `critic_config`."""
    head = Rule(VALUE_HEAD, (STORED_HEAD,), ((1, hf.int("hidden_size")),))
    return [head if rule.name == VALUE_HEAD else rule for rule in family_of(hf).rules(hf)]


def critic_params(hf: HfConfig) -> dict[str, Param]:
    """Return every Megatron parameter of a critic by its name; `hf`: of `critic_config`."""
    return expand(critic_rules(hf))
