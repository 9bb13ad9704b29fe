"""Files that hold the experts of a layer in one tensor: reads an expert's matrices from it, and stacks them again.

Everywhere else an expert's matrices have names of their own, `experts.3.gate_proj.weight`. Qwen3.5 stacks them as
[experts, out, in], with the rows of gate and up one after the other. GPT-OSS, whose experts also have biases, stacks
[experts, in, out], with the columns of gate and up in turn, and releases [experts, out, in] in MXFP4.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_mp.models.mxfp4 import BLOCK, BLOCKS, SCALES, dequantize

STACKED = re.compile(rf"^(.*\.experts)\.(gate_up_proj|down_proj)(_bias|{BLOCKS}|)$")
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)$")
ADAPTER = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(lora_[AB])\.weight$")
TURNS = {"gate": 0, "up": 1}  # order of GPT-OSS's columns


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Place of an expert's matrix [rows, columns] in a stacked tensor, or of its bias if `columns` is 0."""

    stored: str
    expert: int
    rows: range
    columns: int
    transposed: bool = False  # stored as [experts, columns, rows]

    @property
    def is_mxfp4(self) -> bool:
        return self.stored.endswith(BLOCKS)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), self.columns) if self.columns else (len(self.rows),)

    def read(
        self, axis: int | None, start: int, stop: int, open_slice: Callable[[str], Any], to: torch.dtype
    ) -> Tensor:
        """Return the matrix or its slice [start, stop) along `axis`, MXFP4 in the dtype `to`.

        `open_slice`: returns the slices of a stored tensor by its name.
        """
        rows = self.rows[start:stop] if axis == 0 else self.rows
        columns = range(start, stop) if axis == 1 else range(self.columns)
        if not rows or (self.columns and not columns):
            return torch.empty(len(rows), *([len(columns)] if self.columns else []), dtype=to)
        expert = slice(self.expert, self.expert + 1)
        span = slice(rows.start, rows[-1] + 1)
        if self.is_mxfp4:
            blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
            names = (self.stored, self.stored.removesuffix(BLOCKS) + SCALES)
            stored, scales = (open_slice(name)[expert, span, blocks][0][:: rows.step] for name in names)
            first = columns.start - blocks.start * BLOCK
            return dequantize(stored, scales, to)[:, first : first + len(columns)]
        stacked = open_slice(self.stored)
        if not self.columns:
            return stacked[expert, span][0][:: rows.step]
        if self.transposed:
            return stacked[expert, columns.start : columns.stop, span][0][:, :: rows.step].T
        return stacked[expert, span, columns.start : columns.stop][0][:: rows.step]


def expert_parts(shapes: Mapping[str, Callable[[], tuple[int, ...]]]) -> Iterator[tuple[str, ExpertPart]]:
    """Yield the name and the place of each matrix and bias in stacked tensors. `shapes`: functions by stored name."""
    for name, shape in shapes.items():
        match = STACKED.match(name)
        if not match or len(sizes := shape()) == 1:
            continue
        module, projection, kind = match.groups()
        with_biases = f"{module}.{projection}_bias" in shapes
        transposed = with_biases and not kind
        rows = sizes[2] if transposed else sizes[1]
        columns = 0 if kind == "_bias" else sizes[1] if transposed else sizes[2] * (BLOCK if kind else 1)
        parts = {"down": range(rows)}
        if projection == "gate_up_proj" and with_biases:
            parts = {part: range(turn, rows, 2) for part, turn in TURNS.items()}
        elif projection == "gate_up_proj":
            parts = {"gate": range(rows // 2), "up": range(rows // 2, rows)}
        for expert in range(sizes[0]):
            for part, own_rows in parts.items():
                tensor = f"{module}.{expert}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"
                yield tensor, ExpertPart(name, expert, own_rows, columns, transposed)


def stack_experts(tensors: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as files of GPT-OSS hold them; those of the `experts` of a layer when all have arrived."""
    stacks: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, tensor in tensors:
        match = EXPERT.match(name)
        if not match:
            yield name, tensor
            continue
        module, expert, part, kind = match.groups()
        turns = len(TURNS) if part in TURNS else 1
        stacked = f"{module}.{'gate_up' if part in TURNS else part}_proj{'_bias' if kind == 'bias' else ''}"
        if stacked not in stacks:
            *columns, rows = tensor.shape[::-1]
            stacks[stacked] = tensor.new_empty(experts, *columns, turns * rows)
            missing[stacked] = experts * turns
        stacks[stacked][int(expert), ..., TURNS.get(part, 0) :: turns] = tensor.T if kind == "weight" else tensor
        missing[stacked] -= 1
        if not missing[stacked]:
            yield stacked, stacks.pop(stacked)
    if stacks:
        raise ValueError(f"the experts of {min(stacks)} are not complete")


def stack_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return adapters in peft's form for GPT-OSS: one A and one B for all experts of a layer.

    Gate and up of an expert share one adapter of twice the rank. The even rows of its B belong to gate, the odd rows to
    up. A is [experts * ranks, in], B is [out, ranks * experts] (`ParamWrapper.get_delta_weight` of peft). If experts
    have adapters, their down projections have one.
    """
    stacked: dict[str, Tensor] = {}
    layers: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := ADAPTER.match(name):
            module, expert, part, kind = match.groups()
            layers.setdefault(module, {}).setdefault(f"{part}.{kind}", {})[int(expert)] = tensor
        else:
            stacked[name] = tensor
    for module, by_part in layers.items():
        whole = {part: torch.stack([own for _, own in sorted(experts.items())]) for part, experts in by_part.items()}
        pairs = {module: (whole["down.lora_A"], whole["down.lora_B"])}
        if "gate.lora_A" in whole:  # peft wraps its parameter first
            a = torch.cat([whole["gate.lora_A"], whole["up.lora_A"]], 1)
            pairs[f"{module}.base_layer"] = (a, _in_turn(whole["gate.lora_B"], whole["up.lora_B"]))
        for holder, (a, b) in pairs.items():
            stacked[f"{holder}.lora_A.weight"] = a.flatten(0, 1)
            stacked[f"{holder}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1)
    return stacked


def _in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Return the common B of gate and up [experts, 2 * rows, 2 * rank]; `gate` and `up`: [experts, rows, rank]."""
    experts, rows, rank = gate.shape
    both = gate.new_zeros(experts, 2 * rows, 2 * rank)
    both[:, TURNS["gate"] :: 2, :rank] = gate
    both[:, TURNS["up"] :: 2, rank:] = up
    return both
