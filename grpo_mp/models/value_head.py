"""A critic's model: that of a policy's family, with a value head of one column in place of the output layer."""

from dataclasses import replace

from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule, expand

VALUE_HEAD = "output_layer.weight"  # Megatron's name
STORED_HEAD = "score.weight"  # that of transformers' models for sequence classification, as reward models are
CLASSIFIER = "ForSequenceClassification"


def classifier_name(hf: HfConfig) -> str | None:
    """Return the architecture by which a folder's config.json says that it has a head; None: a language model."""
    return next((str(name) for name in hf.get("architectures") or [] if CLASSIFIER in str(name)), None)


def critic_config(hf: HfConfig) -> HfConfig:
    """Return the config of the critic that a policy's or reward model's folder holds.

    Nothing is tied to its head, and it predicts no tokens ahead.
    """
    names = [str(name).replace(CLASSIFIER, "ForCausalLM") for name in hf.get("architectures") or []]
    values = hf.values | {"tie_word_embeddings": False, "architectures": names}
    return replace(hf, values=values, trains_mtp=False)


def critic_rules(hf: HfConfig) -> list[Rule]:
    """Return the mapping's rules for a critic; `hf`: of `critic_config`. Raises UserError for an unknown family."""
    head = Rule(VALUE_HEAD, (STORED_HEAD,), ((1, hf.int("hidden_size")),))
    return [head if rule.name == VALUE_HEAD else rule for rule in family_of(hf).rules(hf)]


def critic_params(hf: HfConfig) -> dict[str, Param]:
    """Return every Megatron parameter of a critic by its name; `hf`: of `critic_config`."""
    return expand(critic_rules(hf))
