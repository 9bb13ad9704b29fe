"""What transformers computes from the same folder, one unpadded sequence at a time: logits and a gradient."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_mp.checkpoint.hf_reader import HfReader
from grpo_mp.utils.types import Sample
from tests.parallel.inputs import (
    CLIPRANGE_VALUE,
    KL_WEIGHT,
    MTP_WEIGHT,
    TEMPERATURE,
    StepSamples,
    add_rollout_logprobs,
    fixed_head,
    old_values,
    random_samples,
    reference_logprobs,
    returns_of,
)
from tools.tiny.models import count_mtp_layer

# Parts of a multi-token-prediction layer beside its decoder layer: DeepSeek's name -> Qwen's.
NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
HY3_NAMES = {name: name for name in NAMES} | {"shared_head.norm": "final_layernorm"}
HY3 = {"gate": "router.gate", "shared_experts": "shared_mlp"}
MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # modules -> files
FILE_NAMES = {"mixtral": MIXTRAL, "minimax_m2": MIXTRAL, "hy_v3": HY3}


@dataclass(frozen=True)
class Expected:
    """Of one model. Logits are [T, V] of each whole sample, at temperature 1."""

    folder: Path
    given: StepSamples
    logits: tuple[Tensor, ...]

    @property
    def scale(self) -> float:
        """The largest absolute logit."""
        return max(float(values.abs().max()) for values in self.logits)

    @cached_property
    def distributions(self) -> tuple[Tensor, ...]:
        """[T, V] log-probabilities of each sample at the rollout's temperature."""
        return tuple((values / TEMPERATURE).log_softmax(-1) for values in self.logits)

    def target(self, sample: Tensor, position: Tensor) -> Tensor:
        """[N] the token that follows each (sample, position)."""
        pairs = zip(sample.tolist(), position.tolist(), strict=True)
        return torch.tensor([self.given.sequence(i)[at + 1] for i, at in pairs])

    def scores(self, sample: int) -> Tensor:
        """[T - 1] logprob at temperature 1 of every token after the first."""
        following = torch.tensor(self.given.sequence(sample)[1:])
        return _of_tokens(self.logits[sample][:-1], following)

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """Of the GRPO loss of the first update, written out, by the names of the files."""
        model = _load(self.folder)
        update = self.given.first_update
        losses = [sample_loss(model, self.given.samples[i], self.given.advantages[i]) for i in update]
        (torch.stack(losses).sum() / len(update)).backward()
        return file_gradients(model) | self.mtp_gradient

    @cached_property
    def critic(self) -> "ExpectedCritic":
        """A linear head on the decoder, by the value loss of the first update, written out."""
        model = _load(self.folder)
        update = self.given.first_update
        head = torch.nn.Parameter(fixed_head(model.config.hidden_size))
        values = [_values(model, head, self.given.samples[i]) for i in update]
        losses = [_value_loss(own, self.given.samples[i]) for own, i in zip(values, update, strict=True)]
        loss = torch.stack(losses).sum() / len(update)
        loss.backward()
        gradient = file_gradients(model) | {"score.weight": head.grad}
        return ExpectedCritic(tuple(own.detach() for own in values), float(loss.detach()), gradient)

    @cached_property
    def mtp_gradient(self) -> dict[str, Tensor]:
        """Of the weighted cross entropy of the token after the next, by a layer that learns alone; {} without one."""
        config = AutoConfig.from_pretrained(self.folder).to_dict()
        if not (config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers")):
            return {}
        layer = MtpLayer(self.folder)
        update = [self.given.samples[i] for i in self.given.first_update]
        losses = [-layer.logprobs(sample).sum() / len(sample.tokens) for sample in update]
        (MTP_WEIGHT * torch.stack(losses).sum() / len(update)).backward()
        return layer.gradient()


@dataclass(frozen=True)
class ExpectedCritic:
    """Values [response tokens] of each sample of the first update, the loss, and its gradient by the files' names."""

    values: tuple[Tensor, ...]
    loss: float
    gradient: dict[str, Tensor]


class MtpLayer(torch.nn.Module):
    """The multi-token-prediction layer of a folder: transformers' decoder layer, and what DeepSeek's paper adds.

    Qwen names it otherwise, and centres its norms on zero, see SGLang's qwen3_next_mtp.py. Hy3 names its last norm
    otherwise, see SGLang's hunyuan_v3_nextn.py.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        in_decoder = self.block_prefix = f"model.layers.{config.num_hidden_layers}."
        self.renamed = FILE_NAMES.get(config.model_type, {})
        stored = HY3_NAMES if config.model_type == "hy_v3" else {name: name for name in NAMES}
        self.names = {name: f"{in_decoder}{own}.weight" for name, own in stored.items()}
        self.centre = 0.0
        if "linear_attention" in (getattr(config, "layer_types", None) or ()):
            self.names = {name: f"mtp.{other}.weight" for name, other in NAMES.items()}
            self.centre = 1.0
            self.block_prefix = "mtp.layers.0."
        count_mtp_layer(config)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, key_mapping={f"^{self.block_prefix}": in_decoder}
        ).eval()
        *decoder, self.block = model.model.layers
        model.model.layers = torch.nn.ModuleList(decoder)
        model.config.num_hidden_layers = len(decoder)
        self.model = [model]  # no module of this one
        with HfReader(folder) as reader:
            own = {name.replace(".", "_"): reader.read(stored) for name, stored in self.names.items()}
        self.own = torch.nn.ParameterDict(own)

    def logprobs(self, sample: Sample) -> Tensor:
        """[T - 1] of the second response token on, at the rollout's temperature: row i sees tokens up to i + 1."""
        (model,) = self.model
        tokens = torch.tensor([sample.prompt_tokens + sample.tokens])
        with torch.no_grad():
            hidden = model.model(tokens).last_hidden_state[:, :-1]
            embedded = model.model.embed_tokens(tokens[:, 1:])
        both = [self._norm(embedded, self.own["enorm"]), self._norm(hidden, self.own["hnorm"])]
        inputs = torch.cat(both, -1) @ self.own["eh_proj"].t()
        positions = torch.arange(inputs.shape[1])[None]
        mask = torch.full((positions.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        rotary = model.model.rotary_emb(inputs, positions)
        output = self.block(inputs, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        output = output[0] if isinstance(output, tuple) else output  # GLM-5's chosen keys follow
        logits = self._norm(output, self.own["shared_head_norm"]) @ model.lm_head.weight.detach().t() / TEMPERATURE
        first = len(sample.prompt_tokens) - 1
        return _of_tokens(logits[0, first:-1], tokens[0, first + 2 :])

    def gradient(self) -> dict[str, Tensor]:
        """The gradients of its parameters by the names of the files."""
        gradients = ((name, p.grad) for name, p in self.block.named_parameters() if p.grad is not None)
        block = _file_tensors(gradients, in_turn=False)
        own = {stored: self.own[name.replace(".", "_")].grad for name, stored in self.names.items()}
        return {self.block_prefix + _renamed(name, self.renamed): gradient for name, gradient in block} | own

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        epsilon = self.model[0].config.rms_norm_eps
        return values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt() * (self.centre + weight)


def rows(values: Sequence[Tensor], sample: Tensor, position: Tensor) -> Tensor:
    """[T, ...] of each sample -> [N, ...] at each (sample, position)."""
    starts = torch.tensor([0, *(len(value) for value in values)]).cumsum(0)
    return torch.cat(list(values))[starts[sample] + position]


def expect(folder: Path, vocabulary: int) -> Expected:
    """Draw samples for the model of a folder, and compute its logits."""
    model = _load(folder)
    samples = random_samples(vocabulary)
    with torch.no_grad():
        logits = tuple(_logits(model, sample) for sample in samples)
    own = [_response(values, sample) for values, sample in zip(logits, samples, strict=True)]
    return Expected(folder, add_rollout_logprobs(samples, own), logits)


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _logits(model: PreTrainedModel, sample: Sample) -> Tensor:
    return model(torch.tensor([sample.prompt_tokens + sample.tokens])).logits[0]


def _of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _response(logits: Tensor, sample: Sample) -> Tensor:
    """[T, V] logits of a whole sample -> logprobs of its response at the rollout's temperature."""
    predicting = logits[len(sample.prompt_tokens) - 1 : -1] / TEMPERATURE
    return _of_tokens(predicting, torch.tensor(sample.tokens))


def sample_loss(model: PreTrainedModel, sample: Sample, advantage: float) -> Tensor:
    """-min(r A, clip(r) A) + weight * (q/p - log(q/p) - 1), mean over tokens; r = p / old, q the reference."""
    own = _response(_logits(model, sample), sample)
    old = torch.tensor(sample.rollout_logprobs)
    reference = reference_logprobs(old, torch.tensor(sample.tokens))
    ratio = (own - old).exp()
    policy_loss = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    kl = (reference - own).exp() - (reference - own) - 1
    return (KL_WEIGHT * kl - policy_loss).mean()


def _values(model: PreTrainedModel, head: Tensor, sample: Sample) -> Tensor:
    """[T] of the state before each response token."""
    hidden = model.model(torch.tensor([sample.prompt_tokens + sample.tokens])).last_hidden_state[0]
    return (hidden @ head[0])[len(sample.prompt_tokens) - 1 : -1]


def _value_loss(values: Tensor, sample: Sample) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), mean over tokens."""
    tokens = torch.tensor(sample.tokens)
    old = old_values(tokens)
    returns = returns_of(tokens)
    near = torch.min(torch.max(values, old - CLIPRANGE_VALUE), old + CLIPRANGE_VALUE)
    return (0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)).mean()


def file_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of a model by the names of the files."""
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    own = _file_tensors(gradients, in_turn=model.config.model_type == "gpt_oss")
    names = FILE_NAMES.get(model.config.model_type, {})
    return {_renamed(name, names): gradient for name, gradient in own}


def _file_tensors(named: Iterable[tuple[str, Tensor]], in_turn: bool) -> Iterator[tuple[str, Tensor]]:
    """The names of the module -> those of the mapping, where experts stand one by one."""
    for name, tensor in named:
        layer, experts, kind = name.rpartition(".experts.")
        if not experts:
            yield name, tensor
            continue
        parts = ("gate_proj", "up_proj") if kind.startswith("gate_up_proj") else ("down_proj",)
        suffix = "bias" if kind.endswith("_bias") else "weight"
        for expert, values in enumerate(tensor):
            rows = values.chunk(len(parts))
            if in_turn:  # columns of gate and up in turn; t() leaves a bias as it is
                rows = tuple(values.t()[turn :: len(parts)] for turn in range(len(parts)))
            for part, piece in zip(parts, rows, strict=True):
                yield f"{layer}.experts.{expert}.{part}.{suffix}", piece


def _renamed(name: str, names: Mapping[str, str]) -> str:
    return ".".join(names.get(part, part) for part in name.split("."))
