"""Models with a scalar value head: critics, which are of a policy's family, and reward models."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule, Shape, expand
from grpo_mp.utils.errors import UserError

VALUE_HEAD = "output_layer.weight"  # Megatron name
STORED_HEAD = "score.weight"  # name in transformers' sequence classification models, such as reward models
OTHER_HEADS = ("v_head.", "value_head.", "score.")  # TRL's models with a value head; two-layer heads
CLASSIFIER = "ForSequenceClassification"


def classifier_name(hf: HfConfig) -> str | None:
    """Return the sequence classification architecture in config.json, or None for a language model."""
    return next((str(name) for name in hf.get("architectures") or [] if CLASSIFIER in str(name)), None)


def check_head(
    names: Collection[str],
    shape_of: Callable[[str], Shape],
    head: Mapping[str, Shape],
    where: str,
    architecture: str | None,
    remedy: str,
) -> None:
    """Raise an error if weights lack a tensor of `head`, or if its shape shows more than one value."""
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
    """Return a critic's config from its policy's or reward model's config: untied, without multi-token prediction."""
    names = [str(name).replace(CLASSIFIER, "ForCausalLM") for name in hf.get("architectures") or []]
    values = hf.values | {"tie_word_embeddings": False, "architectures": names}
    return replace(hf, values=values, trains_mtp=False)


def critic_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping rules of a critic. `hf`: from `critic_config`."""
    head = Rule(VALUE_HEAD, (STORED_HEAD,), ((1, hf.int("hidden_size")),))
    return [head if rule.name == VALUE_HEAD else rule for rule in family_of(hf).rules(hf)]


def critic_params(hf: HfConfig) -> dict[str, Param]:
    """Return the Megatron parameters of a critic by name. `hf`: from `critic_config`."""
    return expand(critic_rules(hf))
