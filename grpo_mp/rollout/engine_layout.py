"""Layout of engines: the ranks of each engine, the division of the model over its GPUs, and its precision.

The rules are SGLang's. Attention is divided over the GPUs of a replica (`attn_dp_size`), routed experts over
GPUs / `ep_size` GPUs, dense and shared MLPs over all GPUs unless they are replicated. In a low precision each GPU's
part of a matrix consists of whole blocks (`Fp8LinearMethod.validate_block_quant_shapes`,
`Fp8MoEMethod.create_fp8_moe_weight_`).

An engine that quantizes weights while loading them cannot load new weights later. Therefore the model of an engine in a
low precision is declared to be stored in it: the engine starts with random weights and loads values and scales at
every sync. After loading, SGLang changes them to the layout of its kernels, and for some kernels it cannot load new
ones then (`RELOADING_MOE_BACKENDS`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mp.checkpoint.hf_writer import fp8_config
from grpo_mp.config.sections import EngineConfig
from grpo_mp.distributed.layout import divisors
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8 import BLOCK
from grpo_mp.models.hf_config import INT4 as INT4_GROUPS
from grpo_mp.models.hf_config import QUANTIZATION_CONFIG, HfConfig
from grpo_mp.models.weight_formats import BLOCKWISE_FP8, FORMATS, INT4, MXFP8, WeightFormat
from grpo_mp.utils.errors import Number, UserError, read_number

OVERRIDES = "json_model_override_args"
# With these backends every GPU holds the full shared experts.
REPLICATING_A2A_BACKENDS = ("deepep", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "flashinfer_megamoe")

CPU_EXPERT_PADDING = 32  # SGLang's DEFAULT_MOE_PADDING_SIZE
PADDING_MOE_BACKENDS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
ATTENTION_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
SINK_BACKENDS = ("fa3", "fa4", "triton", "trtllm_mha")  # attention of SGLang with sinks, on NVIDIA's GPUs
LOADED_MOE_BACKENDS = ("auto", "triton", "triton_kernel")  # into whose layouts rollout/stacked_experts.py loads weights
BLACKWELL = 10.0  # lowest compute capability of Blackwell GPUs
# Values of moe_runner_backend with which SGLang 0.5.23 loads new weights after its kernels' layout was made: MXFP8 by
# `_process_mxfp8_moe_weights` (fp8.py:2317), others replace the scales by a tensor of another dtype or shape; INT4 by
# `restore_weights_before_loading` (compressed_tensors_wNa16_moe.py:406), which the classes of other kernels lack.
RELOADING_MOE_BACKENDS = {
    MXFP8.name: ("auto", "flashinfer_trtllm", "flashinfer_trtllm_routed", "cutlass"),
    INT4.name: ("auto", "marlin"),
}

# Arguments that may place experts on other GPUs than by index, with the values that keep the order.
EXPERT_LOCATION_ARGS = {
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "moe_dp_size": 1,
}


@dataclass(frozen=True)
class EnginePlacement:
    """Location of an engine process, one for each node of the engine. The process with `node_rank` 0 is the host."""

    engine: int
    rank: int  # rank that starts the process
    node_rank: int
    nodes: int

    @property
    def is_host(self) -> bool:
        return self.node_rank == 0


def engine_placements(engine: EngineConfig, world_size: int, ranks_per_node: int) -> tuple[EnginePlacement, ...]:
    """Return the placements of all engine processes, one for each node of an engine.

    Engine e has ranks [f + e * gpus, f + (e + 1) * gpus), with f = world_size - engine.ranks, or f = 0 if unset.
    """
    gpus = engine.gpus_per_engine
    ranks = engine.ranks or world_size
    first = world_size - ranks
    if engine.ranks and first < 1:
        raise UserError(f"engine.ranks={ranks} leaves none of the {world_size} ranks of this job to train: lower it")
    engines = ranks // gpus
    if engines < 1:
        which = "of engine.ranks" if engine.ranks else "of this job"
        raise UserError(f"an engine of engine.gpus_per_engine={gpus} GPUs does not fit the {ranks} ranks {which}")
    part = min(gpus, ranks_per_node)
    if first % part:
        raise UserError(
            f"engine.ranks={ranks} leaves {first} ranks to train, and engines of {gpus} begin at a multiple of {part}: "
            f"set engine.ranks={world_size - first // part * part}"
        )
    if max(gpus, ranks_per_node) % min(gpus, ranks_per_node):
        raise UserError(
            f"engine.gpus_per_engine={gpus} and the {ranks_per_node} ranks of a node do not divide each other"
        )
    nodes = max(1, gpus // ranks_per_node)
    return tuple(
        EnginePlacement(index, first + index * gpus + node * ranks_per_node, node, nodes)
        for index in range(engines)
        for node in range(nodes)
    )


def engine_host_ranks(placements: tuple[EnginePlacement, ...]) -> tuple[int, ...]:
    """Return the ranks that host an engine and have its client, in engine order."""
    return tuple(placement.rank for placement in placements if placement.is_host)


@dataclass(frozen=True)
class EngineParallelism:
    """Parallel sizes of an engine."""

    gpus: int
    replicas: int  # data-parallel replicas of attention, each with its own KV cache and requests
    expert: int  # expert-parallel size
    dense_tensor: int  # tensor-parallel size of dense MLPs
    shared_tensor: int  # tensor-parallel size of shared experts
    num_experts: int  # 0: a dense model
    moves_experts: bool = False  # the engine places experts by load, so that every GPU may hold any expert

    @property
    def attention_tensor(self) -> int:
        return self.gpus // self.replicas

    @property
    def expert_tensor(self) -> int:
        return self.gpus // self.expert

    def keeps_expert(self, index: int, expert: int) -> bool:
        """Return whether the engine's GPU `index` holds a routed expert or a part of it."""
        return self.moves_experts or expert // (self.num_experts // self.expert) == index // self.expert_tensor

    def divisor(self, name: str) -> int:
        """Return the number of GPUs that a matrix outside the routed experts is divided over."""
        if "shared_experts" in name:
            return self.shared_tensor
        return self.dense_tensor if ".mlp." in name else self.attention_tensor


def read_argument(args: Mapping[str, Any], name: str, default: Number) -> Number:
    """Return the number `args[name]`, of the type of `default`; `default` if it is missing or None."""
    value = args.get(name)
    return default if value is None else read_number(type(default), value, f"engine.args.{name}")


def attention_replicas(args: Mapping[str, Any]) -> int:
    """Return `attn_dp_size`, or its deprecated spelling: `dp_size` with `enable_dp_attention`."""
    deprecated = read_argument(args, "dp_size", 1) if args.get("enable_dp_attention") else 1
    return read_argument(args, "attn_dp_size", deprecated)


def engine_parallelism(gpus: int, args: Mapping[str, Any], hf: HfConfig) -> EngineParallelism:
    """Return an engine's parallel sizes; check that they divide each other and the model. `args`: engine.args."""
    replicas = attention_replicas(args)
    expert = read_argument(args, "ep_size", 1)
    if read_argument(args, "dp_size", 1) > 1 and not args.get("enable_dp_attention"):
        raise UserError(
            f"engine.args.dp_size={args['dp_size']} would start full replicas of the engine on other GPUs: set "
            "engine.gpus_per_engine for more engines, or attn_dp_size for replicas of attention inside one"
        )
    values = family_of(hf).config(hf)
    num_experts = values.get("num_moe_experts") or 0
    heads = values["num_attention_heads"]
    key_heads = values.get("linear_num_key_heads", heads)
    tensor = "engine.gpus_per_engine / attn_dp_size"
    for name, size, total, meaning in (
        ("attn_dp_size", replicas, gpus, "engine.gpus_per_engine"),
        ("ep_size", expert, gpus, "engine.gpus_per_engine"),
        ("ep_size", expert, num_experts or expert, "experts of the model"),
        ("attn_dp_size", gpus // replicas, heads, f"attention heads, by {tensor}"),
        ("attn_dp_size", gpus // replicas, key_heads, f"key heads of linear attention, by {tensor}"),
    ):
        if size < 1 or total % size:
            nearest = max(part for part in divisors(total) if part <= max(1, size))
            raise UserError(
                f"engine.args.{name}: {size} does not divide {total}, the {meaning}: the nearest is {nearest}"
            )
    moves_experts = any(args.get(name) not in (None, trivial) for name, trivial in EXPERT_LOCATION_ARGS.items())
    if family_of(hf).stacks_experts:
        _check_stacked(args, moves_experts, hf.model_type)
    shared = 1 if args.get("moe_a2a_backend") in REPLICATING_A2A_BACKENDS else gpus
    return EngineParallelism(
        gpus=gpus,
        replicas=replicas,
        expert=expert,
        dense_tensor=read_argument(args, "moe_dense_tp_size", gpus),
        shared_tensor=shared,
        num_experts=num_experts,
        moves_experts=moves_experts,
    )


def _check_stacked(args: Mapping[str, Any], moves_experts: bool, model_type: str) -> None:
    backend = args.get("moe_runner_backend") or "auto"
    if backend not in LOADED_MOE_BACKENDS:
        raise UserError(
            f"engine.args.moe_runner_backend={backend}: new weights of {model_type} are loaded only for "
            f"{', '.join(LOADED_MOE_BACKENDS)}: set one of these"
        )
    for name in ATTENTION_BACKENDS:
        if args.get(name) not in (None, *SINK_BACKENDS):
            raise UserError(
                f"engine.args.{name}={args[name]}: {model_type} has attention sinks, which SGLang computes with "
                f"{', '.join(SINK_BACKENDS)}: set one of these, or leave it out"
            )
    if moves_experts:
        names = ", ".join(name for name in EXPERT_LOCATION_ARGS if args.get(name))
        raise UserError(f"engine.args.{names}: experts of {model_type} stay where they are: leave it out")


def check_blocks(parallelism: EngineParallelism, hf: HfConfig, form: WeightFormat) -> None:
    """Raise UserError if a GPU's part of a matrix would cut a block of the format, which SGLang refuses as it loads."""
    for param in (rule.example() for rule in family_of(hf).rules(hf) if rule.layers):
        count = parallelism.expert_tensor if param.expert is not None else parallelism.divisor(param.name)
        joined = len(param.hf) > 1 or param.expert is not None  # SGLang concatenates such matrices
        quantized = form.quantized(param)
        for index, (name, shape) in enumerate(zip(param.hf, param.shapes, strict=True)):
            for axis in range(2) if quantized[index] else ():
                divided = axis == param.tp_dim
                if form.pads and not (divided and (joined or count > 1)):
                    continue
                part = shape[axis] / (count if divided else 1)
                if divided and index and param.groups:  # with fewer KV heads than GPUs, SGLang replicates the heads
                    part = max(part, shape[axis] / param.groups)
                if part % form.block[axis]:
                    raise UserError(
                        f"engine.args.quantization={form.name}: {name} has {shape[axis]} {('rows', 'columns')[axis]}, "
                        f"over {count if divided else 1} GPUs of an engine {part:g} each, which is no multiple of the "
                        f"{form.block[axis]} of a block in {form.title}: lower engine.gpus_per_engine, raise "
                        "attn_dp_size or ep_size, or use bfloat16 weights"
                    )


def expert_alignment(
    parallelism: EngineParallelism, args: Mapping[str, Any], form: WeightFormat | None, capability: float | None
) -> int:
    """Return the alignment of a GPU's part of an expert. Aligned parts are loaded by SGLang without padding.

    In a low precision the parts are whole blocks. Unaligned experts are padded by SGLang on CPUs
    (`adjust_config_with_unaligned_cpu_tp`) and for FlashInfer's TensorRT-LLM kernels, which `auto` selects on Blackwell
    (`FusedMoE.__init__`). `capability`: compute capability of the GPUs; None: CPUs.
    """
    if capability is None:
        return CPU_EXPERT_PADDING * parallelism.expert  # SGLang pads the whole expert to a multiple of 32 * GPUs
    backend = args.get("moe_runner_backend", "auto")
    may_pad = backend in PADDING_MOE_BACKENDS or (backend == "auto" and capability >= BLACKWELL)
    return BLOCK if may_pad else max(form.block) if form else 1


def engine_format(args: Mapping[str, Any], hf: HfConfig, cpu: bool) -> WeightFormat | None:
    """Return the format of the engines' projections by engine.args.quantization or the model's folder.

    None: engines load the weights as they are trained.
    """
    name = args.get("quantization")
    if name is None:
        return BLOCKWISE_FP8 if is_fp8_checkpoint(hf) and not cpu else None
    if name not in FORMATS:
        raise UserError(
            f"engine.args.quantization={name}: weights are sent as they are trained, or in "
            f"{', '.join(f'{form.title} ({key})' for key, form in FORMATS.items())}: set one of these, or leave it out"
        )
    form = FORMATS[name]
    if cpu:
        raise UserError(f"engine.args.quantization={name}: engines compute in {form.title} on GPUs only: leave it out")
    if family_of(hf).stacks_experts:
        raise UserError(
            f"engine.args.quantization={name}: SGLang loads no {hf.model_type} in {form.title}: leave it out"
        )
    if form.experts_only and not family_of(hf).config(hf).get("num_moe_experts"):
        raise UserError(
            f"engine.args.quantization={name}: only routed experts are sent in {form.title}, and {hf.model_type} has "
            "none: set fp8, or leave it out"
        )
    return form


def check_dtype(dtype: str, args: Mapping[str, Any], hf: HfConfig, form: WeightFormat | None) -> None:
    """Raise UserError if SGLang computes this model or these `args` in bfloat16 only. `dtype`: model.dtype."""
    if dtype != "float16":
        return
    backend = args.get("moe_a2a_backend") or "none"
    if form:
        what = f"weights in {form.title}"
    elif backend != "none":
        what = f"experts of engine.args.moe_a2a_backend={backend}"
    elif family_of(hf).stacks_experts:
        what = hf.model_type  # its layers have the folder's dtype, its sinks bfloat16
    else:
        return
    raise UserError(f"model.dtype=float16: SGLang computes {what} in bfloat16 only: set model.dtype=bfloat16")


def check_kernels(args: Mapping[str, Any], form: WeightFormat, capability: float | None) -> None:
    """Raise UserError if SGLang has no kernels for the format on these GPUs, or cannot load new weights for them.

    `capability`: compute capability of the GPUs; None: unknown.
    """
    setting = f"engine.args.quantization={form.name}"
    if form == MXFP8 and capability and capability < BLACKWELL:
        raise UserError(
            f"{setting}: SGLang computes in MXFP8 on Blackwell GPUs (compute capability {BLACKWELL:g}), and these have "
            f"{capability:g}: set fp8, or leave it out"
        )
    allowed = RELOADING_MOE_BACKENDS.get(form.name)
    backend = args.get("moe_runner_backend") or "auto"
    if allowed and backend not in allowed:
        raise UserError(
            f"{setting} with moe_runner_backend={backend}: SGLang cannot load new weights into the layout of these "
            f"kernels: set {', '.join(allowed[1:])}, or leave it out"
        )
    if form != INT4:
        return
    if backend == "auto" and capability and capability >= BLACKWELL:
        raise UserError(
            f"{setting}: on Blackwell GPUs SGLang selects Triton kernels, into whose layout it cannot load new "
            "weights: set engine.args.moe_runner_backend=marlin"
        )
    if args.get("moe_a2a_backend") not in (None, "none"):
        raise UserError(
            f"{setting} with moe_a2a_backend={args['moe_a2a_backend']}: SGLang's INT4 kernels of Kimi's format work "
            "with its standard exchange of tokens only: leave moe_a2a_backend out"
        )


def is_fp8_checkpoint(hf: HfConfig) -> bool:
    """Return whether the folder's weights are blockwise FP8."""
    return bool(hf.quantization.get("quant_method") == "fp8")


def precision_arguments(args: Mapping[str, Any], hf: HfConfig, cpu: bool) -> dict[str, Any]:
    """Return the ServerArgs that override the folder's precision; {} if engines compute in the folder's precision.

    With these arguments an engine cannot read the folder's weights.
    """
    form = engine_format(args, hf, cpu)
    if (form is None and not hf.quantization) or (form == BLOCKWISE_FP8 and is_fp8_checkpoint(hf)):
        return {}
    precision = {QUANTIZATION_CONFIG: quantization_config(hf, form) if form else None}
    of_text = {"text_config": precision} if hf.is_text_part else {}
    return {OVERRIDES: json.dumps(json.loads(args.get(OVERRIDES) or "{}") | precision | of_text)}


def quantization_config(hf: HfConfig, form: WeightFormat) -> dict[str, Any]:
    """Return the quantization_config by which SGLang creates the parameters of a format."""
    if form != INT4:
        return fp8_config(hf) | {"quant_method": form.name, "weight_block_size": list(form.block)}
    group = {"targets": ["Linear"], "weights": INT4_GROUPS, "input_activations": None, "output_activations": None}
    return {
        "quant_method": form.name,
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": [r"re:^(?!.*\.experts\.)"],  # all modules but routed experts
    }
