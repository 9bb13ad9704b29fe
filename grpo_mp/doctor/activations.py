"""Activations of a model on given tokens, layer by layer: in transformers, the policy's Megatron model, an engine."""

import asyncio
import re
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_mp import platform
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.forward import sequence_logits
from grpo_mp.policy.load_models import policy_tensors, transformers_model
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.engine_args import FP32_HEAD, EngineSpec
from grpo_mp.rollout.routed_experts import ARGUMENT, RETURN_KEYS
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.utils.errors import UserError

EMBEDDING = "embedding"
OUTPUT = "final norm and output layer"  # point at which the logprobs are compared
START_TIMEOUT_S = 1800.0  # enough to read a large model from a slow disk
REQUEST_TIMEOUT_S = 600.0
Question = Callable[[EngineClient], Awaitable[Any]]


@dataclass(frozen=True)
class Activations:
    """Residual stream at each point of a model, chosen experts of each MoE layer, and logprobs, for N tokens."""

    points: Mapping[str, Tensor]  # float32 [N, hidden]; see `attention_point` and `layer_point`
    experts: Mapping[int, Tensor]  # by layer from 0: chosen experts [N, top-k], sorted
    logprobs: Tensor  # float32 [N - sequences]: of all tokens except the first of each sequence
    # By layer with an indexer: chosen keys, bool [queries, length]. Queries are the tokens that have more keys than an
    # indexer chooses, without the last token of each sequence.
    keys: Mapping[int, Tensor] = field(default_factory=dict)


def attention_point(layer: int) -> str:
    """Return the name of the point after a layer's attention. `layer`: counts from 0."""
    return f"layer {layer}, after attention"


def layer_point(layer: int) -> str:
    """Return the name of the point after a layer's MLP, the end of the layer."""
    return f"layer {layer}, after its MLP"


class Recorder:
    """Collects activations from hooks, sequence after sequence."""

    def __init__(self) -> None:
        self.points: dict[str, list[Tensor]] = defaultdict(list)
        self.experts: dict[int, list[Tensor]] = defaultdict(list)
        self.keys: dict[int, list[Tensor]] = defaultdict(list)

    def add(self, point: str, value: Tensor) -> None:
        self.points[point].append(value.detach().float().cpu().reshape(-1, value.shape[-1]).clone())

    def add_experts(self, layer: int, chosen: Tensor) -> None:
        self.experts[layer].append(chosen.detach().cpu().long().sort(-1).values)

    def add_keys(self, layer: int, chosen: Tensor, length: int) -> None:
        """Add the positions that the queries of one sequence chose, [queries, top-k]; -1: none."""
        positions = chosen[chosen.shape[-1] : length - 1].detach().cpu().long()
        if len(positions):
            keys = torch.zeros(len(positions), length + 1, dtype=torch.bool)
            self.keys[layer].append(keys.scatter_(1, positions % (length + 1), True)[:, :length])

    def activations(self, logprobs: Sequence[Tensor]) -> Activations:
        points = {name: torch.cat(values) for name, values in self.points.items()}
        experts, keys = (
            {layer: torch.cat(values) for layer, values in chosen.items()} for chosen in (self.experts, self.keys)
        )
        return Activations(points, experts, torch.cat([*logprobs]), keys)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the logprobs, float32 [T - 1], of `tokens` [T] except the first, from `logits` [T, V]."""
    return logits[:-1].float().log_softmax(-1).gather(-1, tokens[1:, None].to(logits.device))[:, 0].cpu()


@torch.no_grad()
def run_transformers(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Activations:
    """Compute the activations for `tokens` [sequences, length] in transformers."""
    model = transformers_model(folder, dtype).to(platform.device())
    recorder = Recorder()
    taps = {
        r"model\.embed_tokens": lambda layer, module: _after(module, recorder, EMBEDDING),
        r"model\.layers\.(\d+)\.post_attention_layernorm": lambda layer, module: _before(
            module, recorder, attention_point(layer)
        ),
        r"model\.layers\.(\d+)": lambda layer, module: _after(module, recorder, layer_point(layer)),
        r"model\.layers\.(\d+)\.mlp\.experts": lambda layer, module: module.register_forward_pre_hook(
            lambda _, arguments: recorder.add_experts(layer, arguments[1])
        ),
        r"model\.layers\.(\d+)\.self_attn\.indexer": lambda layer, module: module.register_forward_hook(
            lambda _, __, chosen: recorder.add_keys(layer, chosen[0], tokens.shape[1])
        ),
    }
    _tap(model, taps)
    return recorder.activations(
        [token_logprobs(model(row[None].to(platform.device())).logits[0], row) for row in tokens]
    )


@torch.no_grad()
def run_policy(folder: Path, tokens: Tensor, dtype: str) -> Activations:
    """Compute the activations for `tokens` [sequences, length] in the policy's Megatron model, on one rank."""
    recorder = Recorder()
    vocab_size = HfConfig.read(folder).int("vocab_size")
    taps = {
        r"(?:.*\.)?embedding": lambda layer, module: _after(module, recorder, EMBEDDING),
        r"(?:.*\.)?decoder\.layers\.(\d+)\.pre_mlp_layernorm": lambda layer, module: _before(
            module, recorder, attention_point(layer)
        ),
        r"(?:.*\.)?decoder\.layers\.(\d+)": lambda layer, module: _after(module, recorder, layer_point(layer)),
        r"(?:.*\.)?decoder\.layers\.(\d+)\.mlp\.router": lambda layer, module: module.register_forward_hook(
            lambda _, __, output: recorder.add_experts(layer, _experts_of_map(output[1]))
        ),
        r"(?:.*\.)?decoder\.layers\.(\d+)\.self_attention\.core_attention": lambda layer, module: _add_keys(
            module, recorder, layer
        ),
    }
    with policy_tensors(folder, dtype) as (model, _):
        _tap(model, taps)
        logits = [sequence_logits(model, row)[:, :vocab_size] for row in tokens]
    return recorder.activations([token_logprobs(*each) for each in zip(logits, tokens, strict=True)])


def run_engine(folder: Path, tokens: Tensor, dtype: str) -> Activations:
    """Compute the activations for `tokens` [sequences, length] in an SGLang server that dumps its modules' outputs."""
    recorder = Recorder()
    logprobs = []
    shape = model_shape(HfConfig.read(folder))
    layers = shape.num_layers
    indexed = sorted(shape.indexer.layers) if shape.indexer and shape.indexer.topk < tokens.shape[1] - 1 else []
    arguments = dict.fromkeys((ARGUMENT, RETURN_KEYS), True) if indexed else {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        _engine(folder, dtype, tokens.shape[1], Path(scratch), arguments) as ask,
    ):
        for row in tokens.tolist():
            (scores,) = ask(partial(EngineClient.score, token_lists=[row]))
            logprobs.append(torch.tensor(scores))
            if indexed:
                one = partial(EngineClient.generate, prompt_tokens=row, sampling=SamplingParams(1), routing=shape)
                (output,) = ask(one)
                if output.routed_experts is None:
                    raise UserError(f"{folder}: the engine returned no positions of the keys that its indexers chose")
                for number, layer in enumerate(indexed):
                    recorder.add_keys(layer, torch.from_numpy(output.routed_experts["keys"][:, number]), len(row))
        passes = {}
        for file in sorted(Path(scratch, "dump").glob("*/Pass*.pt")):
            values = torch.load(file, map_location="cpu", weights_only=True)
            passes[tuple(values["model.forward_batch_info.input_ids"].tolist())] = values
        for row in tokens.tolist():
            if tuple(row) not in passes:
                raise UserError(f"{folder}: the engine has not dumped the pass of a sequence: see its log")
            _record_dump(recorder, passes[tuple(row)], layers)
    return recorder.activations(logprobs)


def _record_dump(recorder: Recorder, values: Mapping[str, Any], layers: int) -> None:
    """Record one forward pass from SGLang's dump. SGLang's norms return (output, residual stream)."""
    recorder.add(EMBEDDING, values["model.embed_tokens"])
    for layer in range(layers):
        following = f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < layers else "model.norm"
        recorder.add(attention_point(layer), values[f"model.layers.{layer}.post_attention_layernorm"][1])
        recorder.add(layer_point(layer), values[following][1])
        chosen = values.get(f"model.layers.{layer}.mlp.topk")
        if chosen is not None:
            recorder.add_experts(layer, chosen[1])


@contextmanager
def _engine(
    folder: Path, dtype: str, length: int, scratch: Path, more_arguments: Mapping[str, Any]
) -> Iterator[Callable[[Question], Any]]:
    """Start an SGLang server of a model folder; yield a function that sends it a request."""
    dump = str(scratch / "dump")
    arguments = {"debug_tensor_dump_output_folder": dump, "disable_radix_cache": True, FP32_HEAD: True}
    arguments |= more_arguments
    spec = EngineSpec(
        0, 0, model=folder.resolve(), dtype=dtype, context_tokens=length + 1, cpu=not platform.on_cuda(), args=arguments
    )
    process = EngineProcess(spec, scratch / "engine.log")

    async def answer(question: Question) -> Any:
        client = EngineClient(0, process.url, process.headers, REQUEST_TIMEOUT_S)
        async with aclosing(client):
            return await question(client)

    try:
        process.start()
        process.wait_ready(START_TIMEOUT_S)
        yield lambda question: asyncio.run(answer(question))
    finally:
        process.stop()


def _tap(model: nn.Module, taps: Mapping[str, Callable[[int, nn.Module], object]]) -> None:
    """Call `taps[pattern](layer, module)` for each module whose name matches; layer is the number in the name."""
    for name, module in model.named_modules():
        for pattern, hook in taps.items():
            if match := re.fullmatch(pattern, name):
                hook(int(match[1]) if match.groups() else 0, module)


def _after(module: nn.Module, recorder: Recorder, point: str) -> None:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        recorder.add(point, output[0] if isinstance(output, tuple) else output)

    module.register_forward_hook(hook)


def _before(module: nn.Module, recorder: Recorder, point: str) -> None:
    def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        recorder.add(point, arguments[0])

    module.register_forward_pre_hook(hook)


def _add_keys(attention: Any, recorder: Recorder, layer: int) -> None:
    """Record the keys that a Megatron attention's indexer chooses, which Megatron stores for layers that share them."""
    if getattr(attention, "indexer", None) is None:
        return
    attention.index_share = True

    def hook(_: nn.Module, __: Any, arguments: Mapping[str, Any], output: Tensor) -> None:
        shared = attention._get_index_share_topk_holder(arguments["packed_seq_params"])
        recorder.add_keys(layer, shared[attention.layer_number][0], len(output))

    attention.register_forward_hook(hook, with_kwargs=True)


def _experts_of_map(routing_map: Tensor) -> Tensor:
    """Return the chosen experts [tokens, top-k] from a boolean routing map [tokens, experts]."""
    return routing_map.nonzero()[:, 1].reshape(len(routing_map), -1)
