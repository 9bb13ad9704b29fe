"""Models with a scalar value head: critics, which are of a policy's family, and reward models."""

from dataclasses import replace

from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param, Rule, expand

VALUE_HEAD = "output_layer.weight"  # Megatron name
STORED_HEAD = "score.weight"  # name in transformers' sequence classification models, such as reward models
CLASSIFIER = "ForSequenceClassification"


def is_classifier(hf: HfConfig) -> bool:
    """Return whether config.json names a sequence classification architecture, such as that of a reward model."""
    return any(CLASSIFIER in str(name) for name in hf.get("architectures") or [])


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
