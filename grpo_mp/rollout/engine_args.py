"""SGLang server arguments and environment variables of an engine."""

import ast
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from grpo_mp.checkpoint.hf_reader import HfReader, has_hf_weights
from grpo_mp.config.sections import EngineConfig, RolloutConfig
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import MTP_LAYERS, HfConfig
from grpo_mp.models.weight_formats import BLOCKWISE_FP8, MXFP8
from grpo_mp.platform.cuda_libraries import cuda_environment
from grpo_mp.rollout.engine_layout import ATTENTION_BACKENDS, attention_replicas, precision_arguments
from grpo_mp.rollout.engine_main import ARGUMENTS
from grpo_mp.rollout.routed_experts import RETURN_KEYS
from grpo_mp.rollout.sglang_source import argument_names, model_classes, source_folder
from grpo_mp.rollout.shared_memory import LOADER
from grpo_mp.utils.errors import UserError, did_you_mean
from grpo_mp.utils.files import ENGINE_SCRATCH

ENGINE_SITE = Path(__file__).parents[1] / "platform" / "engine_site"  # first on the PYTHONPATH of a CPU engine
DP_ATTENTION_PORTS = 14  # data-parallel attention uses the rendezvous port p, p + 1 to p + 6, and p + 13
SPARSE_BACKEND = "dsa"
FP32_HEAD = "enable_fp32_lm_head"
CONTEXT_SLACK_TOKENS = 8  # SGLang reserves a few positions of the context
STATES_PER_REQUEST = 4  # of gated delta nets: up to three of a running request, and one in the prefix cache

# Arguments that users cannot set, with the setting to use instead, if any.
RESERVED = {
    "tp_size": "engine.gpus_per_engine",
    "model_path": "model.path",
    "dtype": "model.dtype",
    "random_seed": "run.seed",
    "enable_deterministic_inference": "engine.deterministic",
    FP32_HEAD: "model.fp32_head",
    "trust_remote_code": "model.trust_remote_code",
    "preferred_sampling_params": "rollout.temperature and rollout.top_p",
    "enable_return_routed_experts": "training.router_replay=R3",
    RETURN_KEYS: "training.router_replay=R3_keys",
    "skip_tokenizer_init": "rollout.stop",
    **dict.fromkeys(
        (
            *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk"),
            *("speculative_num_draft_tokens", "speculative_ngram_max_bfs_breadth", "speculative_draft_load_format"),
            *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
        ),
        "engine.speculative",
    ),
    **dict.fromkeys(
        (
            *("host", "port", "nccl_port", "dist_init_addr", "nnodes", "node_rank", "base_gpu_id", "device"),
            *("context_length", "served_model_name", "api_key", "admin_api_key", "tokenizer_path", "load_format"),
            *("enable_memory_saver", "sampling_defaults", "skip_server_warmup", "custom_weight_loader"),
        ),
        "",
    ),
}

DEFAULTS: dict[str, Any] = {"log_level_http": "warning"}
CPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "grammar_backend": "none",
    "max_running_requests": 128,
    "disable_hybrid_swa_memory": True,  # torch_native reads the cache of sliding windows at the slots of the other
}

# The memory saver can free the memory of decode graphs, but rejects breakable graphs, SGLang's default for prefill.
CUDA_DEFAULTS: dict[str, Any] = {"cuda_graph_backend_prefill": "disabled"}

CUDA_ENVIRONMENT = {
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",  # otherwise the memory of captured graphs is never freed
    # Only warn about miscounted cache slots: an error would end the engine, and every weight sync empties the cache.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    # Otherwise NVSHMEM, which DeepEP is built on, would use NCCL for its own collectives.
    "NVSHMEM_DISABLE_NCCL": "1",
    # A restarting engine shares its GPUs with the trainer, whose memory use differs between GPUs.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
}
# The user's environment overrides these. By default DeepGEMM compiles kernels for every batch size up to 16,384 tokens
# during the first requests, which takes 10 to 20 minutes and exceeds the time limit of requests.
CUDA_ENVIRONMENT_DEFAULTS = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
}
GRAPH_REQUESTS = 256  # by default SGLang captures decode graphs up to at least this batch size
# Variables of torchrun and Slurm, with which SGLang would join the trainer's process group in place of its own.
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LAUNCHER_PREFIXES = ("LOCAL_RANK", "LOCAL_WORLD_", "GROUP_", "ROLE_", "TORCHELASTIC_")
# Arguments with which SGLang loads a model class other than, or in addition to, the class in config.json.
MODEL_CLASS_ARGUMENTS = {"speculative_algorithm", "model_impl", "json_model_override_args"}


@dataclass(frozen=True)
class EngineSpec:
    """Specification of an engine process. The process with `node_rank` 0 is the engine host."""

    index: int
    rank: int  # rank that starts the process, for error messages
    model: Path
    dtype: str  # a value of model.dtype
    context_tokens: int  # prompt and response together
    seed: int = 0
    gpus: int = 1
    cpu: bool = False
    save_tokenizer: Callable[[str], Any] | None = None  # saves it to a folder; None: an engine without a tokenizer
    first_gpu: int = 0  # device index on this node
    nodes: int = 1
    node_rank: int = 0
    threads: int = 1  # CPU threads of each process of the engine
    trust_remote_code: bool = False  # run Python code of the model's folder
    dummy_weights: bool = False  # read no weights from the folder, since the first weight sync sends all weights
    args: Mapping[str, Any] = field(default_factory=dict)  # the user's engine.args, merged with the run's arguments


def ports_needed(spec: EngineSpec) -> int:
    """Return the number of consecutive ports that an engine needs; the first is the HTTP server's."""
    return 1 + (DP_ATTENTION_PORTS if _needs_rendezvous(spec) else 1)


def cuda_defaults(args: Mapping[str, Any], in_flight: int, request_timeout_s: float) -> dict[str, Any]:
    """Return default arguments of engines on GPUs, which the user's `args` override.

    `in_flight`: number of concurrent requests. SGLang's watchdog would kill an engine after a forward pass of 300 s,
    which a first compilation or a pause exceeds. Decode graphs for more than `in_flight` requests would cost memory,
    and minutes at each start.
    """
    # The factor 1.5 allows for uneven load of the replicas; a batch above the bound decodes without a graph.
    graph_requests = ceil(1.5 * in_flight / attention_replicas(args))
    bound = {"cuda_graph_max_bs_decode": graph_requests} if graph_requests < GRAPH_REQUESTS else {}
    return {"watchdog_timeout": request_timeout_s, **bound}


def engine_arguments(
    spec: EngineSpec, port: int, served_model_name: str, api_key: str, dist_init_addr: str | None = None
) -> dict[str, Any]:
    """Return the ServerArgs that differ from SGLang's defaults.

    `port`: the first of the `ports_needed` ports; `dist_init_addr`: rendezvous (host:port) of a multi-node engine.
    """
    if dist_init_addr is None and _needs_rendezvous(spec):
        dist_init_addr = f"127.0.0.1:{port + 1}"  # SGLang would choose a port that may be outside the job's range
    context_tokens = spec.context_tokens + CONTEXT_SLACK_TOKENS
    # By default SGLang sizes the CPU caches by the host's memory, which the trainer and other engines also use.
    running_requests = int(spec.args.get("max_running_requests", CPU_DEFAULTS["max_running_requests"]))
    cpu_defaults = {
        **CPU_DEFAULTS,
        "max_total_tokens": running_requests * context_tokens,
        "max_mamba_cache_size": running_requests * STATES_PER_REQUEST,
    }
    # An idle engine leaves the cores to the trainer. Not with data-parallel attention: each replica's first process
    # sleeps up to a second on its own socket, but control requests, of which a weight sync sends hundreds, arrive only
    # at the first replica, so the other replicas would join each request late.
    sleep_on_idle = attention_replicas(spec.args) == 1
    owned = {
        "model_path": str(spec.model),
        "device": "cpu" if spec.cpu else "cuda",
        "dtype": spec.dtype,
        "random_seed": spec.seed,
        "context_length": context_tokens,
        "tp_size": spec.gpus,
        "base_gpu_id": spec.first_gpu,
        "nnodes": spec.nodes,
        "node_rank": spec.node_rank,
        "dist_init_addr": dist_init_addr,
        "host": "127.0.0.1",
        "port": port,
        "nccl_port": port + 1,
        "served_model_name": served_model_name,
        "api_key": api_key,
        "skip_tokenizer_init": spec.save_tokenizer is None,
        "sampling_defaults": "openai",
        "skip_server_warmup": True,
        "trust_remote_code": spec.trust_remote_code,
        "enable_memory_saver": not spec.cpu,
        "custom_weight_loader": [LOADER],
        **({"load_format": "dummy"} if spec.dummy_weights else {}),
    }
    defaults = cpu_defaults if spec.cpu else CUDA_DEFAULTS
    return {**DEFAULTS, **defaults, "sleep_on_idle": sleep_on_idle, **spec.args, **owned}


def engine_environment(
    spec: EngineSpec, arguments: Mapping[str, Any], scratch: str, parent: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of the engine: `parent` without the launcher's variables, and the run's own.

    `arguments`: ServerArgs, passed as a variable; `scratch`: folder for temporary files.
    """
    inherited = {
        name: value
        for name, value in parent.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    python_path = [str(ENGINE_SITE)] * spec.cpu + [str(Path(__file__).parents[2])]
    python_path += filter(None, parent.get("PYTHONPATH", "").split(":"))
    loopback = ",".join(filter(None, [parent.get("no_proxy") or parent.get("NO_PROXY"), "127.0.0.1,localhost"]))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    cpu_environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_MAMBA_CONV_DTYPE": spec.dtype,  # by default the inputs of convolutions are rounded to bfloat16
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_ENABLE_TORCH_INFERENCE_MODE": "true",  # a decode step is faster without autograd's counters
        "SGLANG_NCCL_SO_PATH": "none",  # beside a CUDA build of torch, ranks of an engine would open NCCL on a CPU
        # By default SGLang gives each rank of an engine its own NUMA node; here all ranks share the cores.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * spec.gpus),
    }
    unused = [] if MODEL_CLASS_ARGUMENTS & arguments.keys() else unused_models(spec.model)
    return {
        **({"SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused)} if unused else {}),
        **({} if spec.cpu else CUDA_ENVIRONMENT_DEFAULTS),
        **inherited,
        # By default the kernels that choose keys return slots of the KV cache and not positions.
        **({"SGLANG_DSA_FUSE_TOPK": "false"} if arguments.get(RETURN_KEYS) else {}),
        ARGUMENTS: json.dumps(arguments),
        ENGINE_SCRATCH: scratch,
        "TMPDIR": scratch,
        "PYTHONPATH": ":".join(python_path),
        "PYTHONSAFEPATH": "1",  # a user's queue.py in the working folder must not shadow the standard library
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        # Each rank of an engine samples the token itself. If logits differ in a bit between ranks, a rank may continue
        # with another token than the returned one. With this variable SGLang synchronizes them by a small all-reduce.
        "SYNC_TOKEN_IDS_ACROSS_TP": str(spec.gpus > 1).lower(),
        # Otherwise SGLang drops calls of unknown tools, and the policy would get no error for them.
        "SGLANG_FORWARD_UNKNOWN_TOOLS": "true",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "no_proxy": loopback,
        "NO_PROXY": loopback,
        **(cpu_environment if spec.cpu else {**CUDA_ENVIRONMENT, **cuda_environment(parent)}),
    }


def unused_models(folder: Path) -> list[str]:
    """Return the names of SGLang's model modules that the model of a folder does not need.

    Importing all modules takes an eighth of an engine's start. Returns [] if no module has a class of config.json's
    `architectures`: SGLang may then use the class of transformers.
    """
    config = folder / "config.json"
    if not config.is_file():
        return []
    architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or ()
    modules = model_classes()
    used = {module for module, classes in modules.items() if not classes.isdisjoint(architectures)}
    return [module for module in modules if module not in used] if used else []


def check_arguments(arguments: Mapping[str, Any], section: str = "engine.args") -> None:
    """Raise UserError for an argument that SGLang does not know or that users cannot set. `section`: for errors."""
    known = argument_names()
    for name in arguments:
        if name in RESERVED:
            remedy = f"set {RESERVED[name]}" if RESERVED[name] else "the run sets it"
            raise UserError(f"{section}.{name} cannot be set: {remedy}")
        if name not in known:
            raise UserError(f"{section}.{name}: the installed SGLang has no such argument{did_you_mean(name, known)}")


def check_tool_parser(name: str) -> None:
    """Check that the installed SGLang has a tool-call parser of this name, by reading its source."""
    source = source_folder() / "function_call" / "function_call_parser.py"
    tables = [node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.AnnAssign)]
    keys = [key for table in tables if isinstance(table, ast.Dict) for key in table.keys]
    known = [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    if name not in known:
        hint = did_you_mean(name, known)
        raise UserError(
            f"rollout.tool_parser={name}: the installed SGLang has no such parser{hint}: {', '.join(known)}"
        )


def speculative_arguments(engine: EngineConfig, rollout: RolloutConfig) -> dict[str, Any]:
    """Return the ServerArgs for `engine.speculative`.

    `mtp`: the drafting layer is read from the model's folder, because it may be untrained and then no weight sync sends
    it; a host copy restores it after the engine slept. It shares the model's embedding and output head.
    """
    speculative = engine.speculative
    if speculative.algorithm == "none":
        return {}
    drafting = {
        "mtp": {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": speculative.num_steps,
            "speculative_eagle_topk": 1,
            "speculative_draft_load_format": "auto",
            "enable_draft_weights_cpu_backup": True,
        },
        "ngram": {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1},
    }
    return {
        "speculative_num_draft_tokens": speculative.verified_tokens,
        # With speculative decoding SGLang would lower the default to 48.
        "max_running_requests": engine.args.get(
            "max_running_requests", engine.most_groups(rollout) * rollout.group_size
        ),
        **drafting[speculative.algorithm],
    }


def check_speculation(engine: EngineConfig, hf: HfConfig, cpu: bool) -> None:
    """Check that SGLang supports `engine.speculative` here and samples from the model's exact distribution."""
    algorithm = engine.speculative.algorithm
    if algorithm == "none":
        return
    reason = None
    if cpu:
        reason = "needs a GPU: on a CPU SGLang accepts the most probable tokens, whatever rollout.temperature says"
    elif algorithm == "ngram" and attention_replicas(engine.args) > 1:
        reason = "does not work with attention in replicas: SGLang's n-grams are those of one process"
    elif algorithm == "mtp":
        reason = _missing_draft(engine, hf)
    if reason:
        raise UserError(f"engine.speculative.algorithm={algorithm} {reason}: change that, or set none")


def check_sparse_attention(engine: EngineConfig, hf: HfConfig, cpu: bool) -> None:
    """Check that engines on GPUs compute a model's sparse attention: with other backends SGLang attends to all keys.

    SGLang sets the backend, the dtype of its KV cache and the page size itself.
    """
    if cpu or hf.get("index_topk") is None:
        return
    for name in ATTENTION_BACKENDS:
        if engine.args.get(name) not in (None, SPARSE_BACKEND):
            raise UserError(
                f"engine.args.{name}={engine.args[name]}: only {SPARSE_BACKEND} computes the sparse attention of "
                f"{hf.model_type}: leave it out"
            )
    if engine.args.get("quantization") == MXFP8.name:
        raise UserError(
            f"engine.args.quantization={MXFP8.name}: SGLang misreads its scales in the indexers of {hf.model_type}: "
            f"set {BLOCKWISE_FP8.name}"
        )
    if engine.deterministic:
        raise UserError(
            f"engine.deterministic=true: SGLang has no such kernels for the sparse attention of {hf.model_type}: "
            "set false, or use engines on CPUs"
        )


def _missing_draft(engine: EngineConfig, hf: HfConfig) -> str | None:
    if not hf.mtp_layers:
        return f"needs a multi-token-prediction layer, and {hf.path} counts none ({' or '.join(MTP_LAYERS)})"
    if not has_hf_weights(hf.path) or precision_arguments(engine.args, hf, cpu=False):
        return f"reads the drafting layer from {hf.path}, which must hold weights in the engine's precision"
    with HfReader(hf.path) as reader:
        has_layer = any(name.startswith(family_of(hf).mtp_prefix(hf)) for name in reader.names)
    if not has_layer:
        return f"needs the weights of the multi-token-prediction layer, which {hf.path} lacks"
    return None


def _needs_rendezvous(spec: EngineSpec) -> bool:
    return spec.nodes > 1 or attention_replicas(spec.args) > 1
