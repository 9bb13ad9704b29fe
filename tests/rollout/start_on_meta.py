"""SGLang's start on CUDA up to the first kernel: `python -m tests.rollout.start_on_meta < cases.json`.

A case is {"name": ServerArgs}. Prints {"name": {"error": ...} or facts} as the last line. SGLang is imported once; each
case runs in a fork.

What SGLang asks of a GPU is answered as an H100 of 80 GB in a node of eight would. Replaced are, whole:

- `torch.cuda`: what the device is, how many there are, how much memory is free; streams and events, which do nothing;
- packages with kernels that have no CPU build: they import, and fail where they are called; a Blackwell kernel, whose
  module compiles it at import, says as on an H100 that it is of no use;
- process groups: a size and a rank, no connection;
- tensors on "cuda" are on meta: shapes and dtypes without memory.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from torch.overrides import TorchFunctionMode

from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.multi_token_prediction import is_of_mtp
from grpo_mp.platform.engine_plugin import register
from grpo_mp.rollout.engine_args import CUDA_ENVIRONMENT
from grpo_mp.utils.files import ENGINE_SCRATCH
from grpo_mp.weight_sync.plan import Piece
from grpo_mp.weight_sync.wire import WireFormat

GIB = 2**30
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * GIB,
    multi_processor_count=132,
    warp_size=32,
    uuid="GPU-0",
)
GPUS_PER_NODE = 8
CACHES = 30.0  # GiB of a GPU that weights leave to caches
KERNEL_PACKAGES = ("deep_ep", "deep_gemm", "torch_memory_saver")
BLACKWELL_KERNEL = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"
PARALLEL_FIELDS = {  # group -> the fields of SGLang's parallel state that hold its size and this process's rank in it
    "world_group": ("tp_size", "tp_rank"),
    "tp_group": ("tp_size", "tp_rank"),
    "pp_group": ("pp_size", "pp_rank"),
    "moe_ep_group": ("moe_ep_size", "moe_ep_rank"),
    "moe_tp_group": ("moe_tp_size", "moe_tp_rank"),
    "moe_dp_group": ("moe_dp_size", "moe_dp_rank"),
    "attn_tp_group": ("attn_tp_size", "attn_tp_rank"),
    "attn_cp_group": ("attn_cp_size", "attn_cp_rank"),
}
MODELS = (
    "deepseek_v2",
    "deepseek_nextn",
    "kimi_k25",
    "glm4_moe",
    "glm4_moe_nextn",
    "glm4_moe_lite",
    "glm4_moe_lite_nextn",
    "hunyuan_v3",
    "minimax_m2",
    "qwen2",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3",
    "qwen3_next",
    "qwen3_next_mtp",
    "qwen3_5_text",
    "qwen3_5_mtp",
    "llama",
    "mixtral",
    "gpt_oss",
)
ARGUMENTS = (
    *("load_format", "sleep_on_idle", "enable_memory_saver", "max_running_requests"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_load_format"),
    *("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
    *("speculative_accept_threshold_single", "speculative_accept_threshold_acc", "enable_draft_weights_cpu_backup"),
)


def run_cases(function: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Print what the function says of each case on stdin, as the last line."""
    cases = json.load(sys.stdin)
    os.environ |= CUDA_ENVIRONMENT
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[ENGINE_SCRATCH] = scratch
        register()
    assert sys.modules["megatron"] is None  # as in every process of an engine
    fake_h100()
    disable_other_models(MODELS)
    import sglang.srt.model_loader.loader
    import sglang.srt.models.registry  # noqa: F401

    print(json.dumps({name: run_in_fork(function, case) for name, case in cases.items()}))


def run_in_fork(function: Callable[[dict[str, Any]], dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """Return what the function says of a case, or {"error": ...}: SGLang keeps its arguments and groups in globals."""
    receiver, sender = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_send_facts, args=(sender, function, case))
    child.start()
    sender.close()
    try:
        facts: dict[str, Any] = receiver.recv()
    except EOFError:
        facts = {"error": "the process ended without a word"}
    child.join()
    return facts


def _send_facts(
    connection: Connection, function: Callable[[dict[str, Any]], dict[str, Any]], case: dict[str, Any]
) -> None:
    try:
        connection.send(function(case))
    except Exception as error:  # noqa: BLE001 - whatever SGLang raises is the result
        traceback.print_exc()
        connection.send({"error": f"{type(error).__name__}: {error}"})


def start_on_meta(arguments: dict[str, Any]) -> dict[str, Any]:
    """Resolve the arguments, choose the graph backends, build rank 0's model on meta. Raises what SGLang raises."""
    from sglang.srt.runtime_context import SpawnRanks, get_exec, get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**arguments)
    server_args.resolve_once()
    server_args.check_server_args()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    set_groups(get_parallel())
    model = build_model(server_args)
    graphs = get_exec().graph.cuda_graph_config
    resolved = _resolved_arguments(server_args)
    drafts = resolved["speculative_algorithm"] == "EAGLE"
    draft = build_model(server_args, draft=True) if drafts else None
    return {
        "prefill": graphs.prefill.backend,
        "decode": graphs.decode.backend,
        "backends": _graph_backends(graphs),
        "attn_dp_size": get_parallel().attn_dp_size,
        "attn_tp_size": get_parallel().attn_tp_size,
        "moe_ep_size": get_parallel().moe_ep_size,
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "fp8_matrices": sum(parameter.element_size() == 1 for parameter in model.parameters()),
        "port": server_args.port,
        "ports": _claimed_ports(server_args),
        "draft": type(draft).__name__,
        "draft_bytes": sum(parameter.nbytes for parameter in draft.parameters()) if draft else 0,
        "synced": [_loaded_by_sync(each, server_args) for each in (model, draft)] if draft else [],
        "states": _states_of_linear_attention(server_args),
        "pools": _pools_with_windows(server_args),
        **resolved,
    }


def _states_of_linear_attention(server_args: Any) -> list[float]:
    """Divide `CACHES` GiB as SGLang does; return running sequences, and GiB of their states: [] for other models."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config = mambaish_config(ModelConfig.from_server_args(server_args))
    if config is None:
        return []
    configurator = Mock(
        spec_algorithm=SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm),
        mambaish_config=config,
        hybrid_gdn_config=config,
        pp_size=1,
        attn_dp_size=get_parallel().attn_dp_size,
        extra_mamba_cache_bytes_per_req=0,
        fused_entry_bytes=lambda kind: None,
    )
    configurator._calculate_mamba_ratio = partial(KVCacheConfigurator._calculate_mamba_ratio, configurator)
    rest = KVCacheConfigurator._handle_max_mamba_cache(configurator, CACHES)
    return [get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio(), CACHES - rest]


def _pools_with_windows(server_args: Any) -> list[int]:
    """Divide `CACHES` GiB as SGLang does; return the tokens of layers without and with a window: [] for others."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    config = ModelConfig.from_server_args(server_args)
    if not config.is_hybrid_swa:
        return []
    configurator = Mock(
        spec=KVCacheConfigurator,
        model_config=config,
        is_hybrid_swa=True,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        layer_info=config,  # a stage of a pipeline has some layers, this one has all
        sliding_window_size=config.hf_config.sliding_window,
        page_size=1,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        fused_entry_bytes=lambda kind: None,
    )
    pools = create_memory_pool_configurator(configurator).calculate_pool_sizes(CACHES * GIB, 1)
    return [pools.full_max_total_num_tokens, pools.swa_max_total_num_tokens]


def _loaded_by_sync(model: Any, server_args: Any) -> dict[str, list[str]]:
    """Load the synced tensors of a trained draft layer; return the loaded and the missing names.

    Its weights are on meta: nothing is copied, and SGLang's own loaders check names and shapes.
    """
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    from grpo_mp.rollout.engine_layout import engine_format

    hf = HfConfig.read(Path(server_args.model_path), trains_mtp=True)
    params = family_of(hf).params(hf)
    sizes = dict.fromkeys(params, 1)
    form = engine_format({"quantization": server_args.quantization}, hf, cpu=False)
    wire = WireFormat(params, sizes, torch.bfloat16, form)
    names = [name for name, param in params.items() if is_of_mtp(param, hf) and not param.alias]
    specs = wire.all_specs(map(Piece, names))
    loaded = set[str]()
    for name, parameter in model.named_parameters():
        load = getattr(parameter, "weight_loader", default_weight_loader)
        parameter.weight_loader = partial(_record, loaded, name, load)
    with cuda_on_meta():
        model.load_weights((spec.name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs)
    return {"loaded": sorted(loaded), "others": sorted({name for name, _ in model.named_parameters()} - loaded)}


def _record(loaded: set[str], name: str, load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    loaded.add(name)
    return load(*args, **options)


def _claimed_ports(server_args: Any) -> list[int]:
    """List every port that SGLang takes for this engine; those of its replicas follow dist_init_addr."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import DP_ATTENTION_HANDSHAKE_PORT_DELTA, PortArgs

    ports = [server_args.port, server_args.nccl_port]
    if get_parallel().dist_init_addr is not None:
        rendezvous = int(get_parallel().dist_init_addr.rpartition(":")[2])
        ports += [rendezvous, rendezvous + DP_ATTENTION_HANDSHAKE_PORT_DELTA]
    names = vars(PortArgs.init_new(server_args)).values()
    return ports + [int(name.rpartition(":")[2]) for name in names if str(name).startswith("tcp://")]


def _resolved_arguments(server_args: Any) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolving_view

    resolved = resolving_view(server_args)
    return {name: getattr(resolved, name) for name in ARGUMENTS}


def _graph_backends(graphs: Any) -> list[str]:
    """Name the classes of the backends that SGLang makes for decode and prefill where they are not disabled."""
    from sglang.srt.model_executor.runner_backend.utils import resolve_decode_backend, resolve_prefill_backend

    runner = SimpleNamespace(device_module=None, model_runner=SimpleNamespace(device="cuda"))
    makers = {"decode": resolve_decode_backend, "prefill": resolve_prefill_backend}
    enabled = [make for phase, make in makers.items() if graphs[phase].backend != "disabled"]
    return [type(make(runner)).__name__ for make in enabled]  # type: ignore[arg-type]


def build_model(server_args: Any, draft: bool = False) -> Any:
    """Build the model of this process's rank on meta, or the one that drafts for it."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    model_config = ModelConfig.from_server_args(server_args, is_draft_model=draft)
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_dp_attention(server_args)
    load_config = LoadConfig(load_format="dummy")
    quantized = _get_quantization_config(model_config, load_config)
    with set_default_torch_dtype(model_config.dtype), cuda_on_meta():
        return _initialize_model(model_config, load_config, quantized)


class NullStream:
    """A stream or an event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass(frozen=True)
class FakeGroup:
    """One rank's view of a process group that nobody joined."""

    world_size: int
    rank_in_group: int
    local_rank: int = 0
    device_group: None = None

    @property
    def cpu_group(self) -> "FakeGroup":
        return self

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


def fake_h100() -> None:
    """Replace what torch.cuda answers in this process, for good."""
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "device_count": GPUS_PER_NODE,
        "current_device": 0,
        "get_device_properties": H100,
        "get_device_name": H100.name,
        "get_device_capability": (H100.major, H100.minor),
        "mem_get_info": (H100.total_memory - GIB, H100.total_memory),
        "set_device": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.get_device_module = lambda *_: torch.cuda
    torch.cuda.Stream = torch.cuda.Event = NullStream  # type: ignore[misc,assignment]
    import sitecustomize  # the engine's stand-ins

    sitecustomize.STAND_INS = (*sitecustomize.STAND_INS, *KERNEL_PACKAGES)
    import deep_gemm

    deep_gemm.get_num_sms = lambda: H100.multi_processor_count  # indexers of sparse attention ask for it
    kernel = ModuleType(BLACKWELL_KERNEL)
    vars(kernel).update(
        MAX_DUAL_GEMM_DECODE_TOKENS=0, DualGemmQuantMode=Mock(), can_use_dual_gemm=lambda *_, **__: False
    )
    sys.modules[BLACKWELL_KERNEL] = kernel


def set_groups(parallel: Any) -> None:
    """Give SGLang's parallel state, which knows its sizes and ranks, groups of them."""
    from sglang.srt.distributed import parallel_state

    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [
        rank // GPUS_PER_NODE == source_rank // GPUS_PER_NODE for rank in range(group.world_size)
    ]
    groups = {
        group: FakeGroup(getattr(parallel, size), getattr(parallel, rank))
        for group, (size, rank) in PARALLEL_FIELDS.items()
    }
    parallel.override_permanently(**groups)


@contextmanager
def cuda_on_meta() -> Iterator[None]:
    """Make tensors without memory in the body, also where the caller says "cuda"."""
    with torch.device("meta"), _MetaForCudaMode():
        yield


class _MetaForCudaMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _meta_for_cuda(value) for name, value in (kwargs or {}).items()}
        if type(named.get("device")) is int:  # the number of a GPU
            named["device"] = "meta"
        return func(*map(_meta_for_cuda, args), **named)


def _meta_for_cuda(value: Any) -> Any:
    return "meta" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


def disable_other_models(kept: tuple[str, ...]) -> None:
    """Restrict SGLang's model registry to these files; importing all models takes ten seconds."""
    import sglang.srt.models as models

    names = {name.removesuffix(".py") for name in os.listdir(models.__path__[0])}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(names - set(kept)))


if __name__ == "__main__":
    run_cases(start_on_meta)
