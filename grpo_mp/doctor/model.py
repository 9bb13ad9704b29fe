"""Find the layer at which the policy or the engine begins to differ from transformers on the same tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from grpo_mp.distributed.layout import ModelShape, model_shape
from grpo_mp.doctor.activations import (
    EMBEDDING,
    OUTPUT,
    Activations,
    attention_point,
    layer_point,
    run_engine,
    run_policy,
    run_transformers,
)
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.rounding import UNIT_ROUNDOFF
from grpo_mp.utils.findings import Finding, Level

FLOAT32_TOLERANCE = 1e-4  # relative error at a point; another order of summation causes less
LOW_PRECISION_FACTOR = 4.0  # allowed error, as a multiple of the error of transformers in the same precision
LOW_PRECISION_FLOOR = 0.02  # relative errors below this value are normal for bfloat16; an eighth of it for float16
TRANSFORMERS = "transformers"
# Allowed share of rerouted tokens, and of other keys: scores may almost tie
FLOAT32_REROUTED = 0.01
LOW_PRECISION_REROUTED = 0.1


@dataclass(frozen=True)
class Distance:
    """Distance of a model from the reference at one point.

    `error`: |x - reference| / |reference| over the tokens that chose the same experts in all layers so far, because
    another choice changes x by a jump. `rerouted`: share of these tokens that choose other experts in this layer.
    """

    error: float
    rerouted: float = 0.0


@dataclass(frozen=True)
class PointError:
    """Distance from transformers in float32 at one point, of a model and of transformers in the model's precision."""

    point: str
    model: Distance
    own: Distance | None  # distance of transformers in the model's precision; None for float32
    floor: float = LOW_PRECISION_FLOOR  # errors below it are normal for the model's precision

    @property
    def is_large(self) -> bool:
        """Return whether the error is too large for rounding."""
        if self.own is None:
            return not (self.model.error <= FLOAT32_TOLERANCE and self.model.rerouted <= FLOAT32_REROUTED)
        most = max(self.floor, LOW_PRECISION_FACTOR * self.own.error)
        most_rerouted = max(LOW_PRECISION_REROUTED, LOW_PRECISION_FACTOR * self.own.rerouted)
        return not (self.model.error <= most and self.model.rerouted <= most_rerouted)


def compare_models(folder: Path, tokens: Tensor, dtype: str, without: Collection[str] = ()) -> list[Finding]:
    """Compare policy and engine with transformers on `tokens` [sequences, length]. `without`: names to skip."""
    hf = HfConfig.read(folder)
    layers = hf.int("num_hidden_layers")
    reference = run_transformers(folder, tokens, torch.float32)
    same = None if dtype == "float32" else run_transformers(folder, tokens, getattr(torch, dtype))
    floor = LOW_PRECISION_FLOOR * UNIT_ROUNDOFF[dtype] / UNIT_ROUNDOFF["bfloat16"]
    runs = {"policy": run_policy, "engine": run_engine}
    found = {name: run(folder, tokens, dtype) for name, run in runs.items() if name not in without}
    return [
        *(
            finding
            for name, model in found.items()
            for finding in diagnose_model(name, model, reference, same, layers=layers, floor=floor)
        ),
        *compare_keys(found | {TRANSFORMERS: same or reference}, reference, model_shape(hf), tokens.shape[1]),
    ]


def compare_keys(
    models: Mapping[str, Activations], reference: Activations, shape: ModelShape, length: int
) -> list[Finding]:
    """Return a finding with the share of equal keys that indexers choose in each two models; [] without indexers.

    `models`: by name, transformers in the same precision last; `reference`: transformers in float32; `length`: of a
    sequence.
    """
    if not shape.indexer:
        return []
    if length - 1 <= shape.indexer.topk:
        sentence = f"indexers choose all keys of {length} tokens: to compare them, set --length above "
        return [Finding(Level.OK, f"{sentence}{shape.indexer.topk + 1}")]
    layers = sorted(reference.keys)
    own = min(equal_keys(models[TRANSFORMERS].keys[layer], reference.keys[layer]) for layer in layers)
    tolerance = FLOAT32_REROUTED
    if models[TRANSFORMERS] is not reference:
        tolerance = max(LOW_PRECISION_REROUTED, LOW_PRECISION_FACTOR * (1 - own))
    shares = {
        f"{one} and {other}": [equal_keys(models[one].keys[layer], models[other].keys[layer]) for layer in layers]
        for one, other in combinations(models, 2)
    }
    lines = [
        f"layer {layer}: " + ", ".join(f"{names} {of_pair[number]:.2%}" for names, of_pair in shares.items())
        for number, layer in enumerate(layers)
    ]
    least = ", ".join(f"{names} {min(of_pair):.2%}" for names, of_pair in shares.items())
    sentence = f"equal keys of indexers in the layer with the fewest: {least}"
    if min(map(min, shares.values())) >= 1 - tolerance:
        return [Finding(Level.OK, sentence, lines)]
    advice = "compare the weights of indexers and their rope settings; engines on GPUs store an indexer's keys in FP8"
    return [Finding(Level.WARNING, sentence, lines, advice)]


def equal_keys(one: Tensor, other: Tensor) -> float:
    """Return the share of the keys of `one` that `other` chooses, too; bool [queries, length] each."""
    return float((one & other).sum() / one.sum())


def relative_error(values: Tensor, reference: Tensor) -> float:
    """Return |values - reference| / |reference|, computed in float64."""
    return float((values.double() - reference.double()).norm() / reference.double().norm())


def distances(model: Activations, reference: Activations, layers: int) -> dict[str, Distance]:
    """Return the distance at each point in order; stop when no token has kept the experts of the reference."""
    kept = torch.ones(len(next(iter(reference.points.values()))), dtype=torch.bool)
    found = {EMBEDDING: Distance(relative_error(model.points[EMBEDDING], reference.points[EMBEDDING]))}
    for layer in range(layers):
        rerouted = 0.0
        point = attention_point(layer)
        found[point] = Distance(relative_error(model.points[point][kept], reference.points[point][kept]))
        if layer in reference.experts and layer in model.experts:
            same = (model.experts[layer] == reference.experts[layer]).all(1)
            rerouted = 1 - float(same[kept].double().mean())
            kept &= same
        point = layer_point(layer)
        found[point] = Distance(relative_error(model.points[point][kept], reference.points[point][kept]), rerouted)
        if not kept.any():
            return found
    sequences = len(kept) - len(reference.logprobs)
    scored = kept.view(sequences, -1)[:, :-1].flatten()  # a token's logprob is computed one position earlier
    if scored.any():
        found[OUTPUT] = Distance(relative_error(model.logprobs[scored], reference.logprobs[scored]))
    return found


def point_errors(
    model: Activations,
    reference: Activations,
    same_precision: Activations | None,
    layers: int,
    floor: float = LOW_PRECISION_FLOOR,
) -> list[PointError]:
    """Return the errors of a model at all points.

    `same_precision`: activations of transformers in the model's precision; None for float32. `floor`: of `PointError`.
    """
    own = distances(same_precision, reference, layers) if same_precision else {}
    found = distances(model, reference, layers)
    return [PointError(point, distance, own.get(point), floor) for point, distance in found.items()]


def diagnose_model(
    name: str,
    model: Activations,
    reference: Activations,
    same_precision: Activations | None,
    layers: int,
    floor: float = LOW_PRECISION_FLOOR,
) -> list[Finding]:
    """Return the findings about a model. `name`: 'policy' or 'engine'."""
    errors = point_errors(model, reference, same_precision, layers, floor)
    table = _table(name, errors, model, reference, same_precision)
    first = next((index for index, each in enumerate(errors) if each.is_large), None)
    if first is None:
        return [Finding(Level.OK, f"the {name} computes what transformers does", table)]
    wrong = errors[first]
    before = f"{errors[first - 1].point} still agrees ({errors[first - 1].model.error:.1e})" if first else "the first"
    other = f", other experts for {wrong.model.rerouted:.0%} of the tokens" if wrong.model.rerouted else ""
    error = f"relative error {wrong.model.error:.1e}{other}"
    sentence = f"the {name} parts from transformers at: {wrong.point} ({error}); {before}"
    return [Finding(Level.ERROR, sentence, table, advice(wrong.point))]


def _table(
    name: str,
    errors: Sequence[PointError],
    model: Activations,
    reference: Activations,
    same_precision: Activations | None,
) -> list[str]:
    """Return the lines of a table: error at each point, share of rerouted tokens, difference of the logprobs."""
    lines = [f"{'':28} {name:>8}  transformers in the same precision"]
    for each in errors:
        own = each.own or Distance(0.0)
        lines.append(f"{each.point:28} {each.model.error:8.1e}  {own.error:8.1e}")
        if each.model.rerouted or own.rerouted:
            lines.append(f"{'    tokens with other experts':28} {each.model.rerouted:8.2%}  {own.rerouted:8.2%}")
    both = (model, same_precision or reference)
    largest, own_largest = (float((each.logprobs - reference.logprobs).abs().max()) for each in both)
    return [*lines, f"{'largest logprob difference':28} {largest:8.1e}  {own_largest:8.1e}"]


def advice(point: str) -> str:
    """Return the advice for a model that begins to differ from transformers at `point`."""
    if point == EMBEDDING:
        return "compare the weights of the embedding, and the padding of its vocabulary"
    if point == OUTPUT:
        return (
            "compare the final norm and the output layer; look at whether it is tied to the embedding, and at soft caps"
        )
    if point.endswith("attention"):
        return "compare the weights of that layer's attention; look at rope settings, norms of q and k, biases, scale"
    return "compare the weights of that layer's MLP; look at its router (bias, scale, groups) and its shared experts"


def random_tokens(vocab_size: int, sequences: int, length: int, seed: int = 0) -> Tensor:
    """Return reproducible random tokens [sequences, length]."""
    return torch.randint(vocab_size, (sequences, length), generator=torch.Generator().manual_seed(seed))
