"""Test the whole training loop with random models, on this machine or in a Slurm allocation; 20 minutes on GPUs.

    python -m tools.smoke [--ranks N] [--out runs/smoke] [--only NAME ...]

Checks the machine, measures an engine (decoding beside SGLang's own benchmark, memory asleep and awake), trains a Qwen3
MoE with each schedule and a DeepSeek-V3 for three steps each, kills and resumes a run, checks the exported model, and
measures the rates that plans assume. Prints one line per check, and writes
OUT/cluster.yaml for `grpo-mp plan --cluster OUT/cluster.yaml`. The exit status is 1 if a check failed.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_mp import platform
from grpo_mp.checkpoint.run_state import METRICS
from grpo_mp.config import load_settings
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.planner.clusters import PROFILES, cluster_names, read_cluster
from grpo_mp.utils.errors import UserError, exit_with
from grpo_mp.utils.parsers import Parser, positive_int
from tools.smoke_engine import Workload, check_sleep, decode_gb_s, describe, measure_engine, planned_engine
from tools.smoke_rates import measure_rates
from tools.tiny.arithmetic import make_problems, vocabulary_words, write_jsonl
from tools.tiny.models import make_tiny, make_tokenizer

STEPS = 3
DECODING = "decode_gb_s.json"  # rate at which the engine of the check `engine` reads memory
JOB_LIMIT_S = 1800.0
CONFIG = Path("configs/tiny_moe.yaml")
# Shapes of Qwen3-30B and DeepSeek-V3 with fewer layers and experts: 1.3 and 1.6 billion parameters.
GPU_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "initializer_range": 0.02,
    },
    "deepseek_v3": {
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 6144,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 1024,
        "initializer_range": 0.02,
    },
}


@dataclass(frozen=True)
class Machine:
    """Ranks and output folder of the checks. `ranks`: number of ranks on all nodes."""

    ranks: int
    folder: Path

    @property
    def on_slurm(self) -> bool:
        """Return whether srun starts the ranks, on all nodes of the allocation."""
        return int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1

    def train_command(self, name: str, settings: Sequence[str]) -> list[str]:
        """Return the command that trains with the given settings. `name`: name of the run."""
        if not self.on_slurm:
            return [sys.executable, "-m", "grpo_mp", "train", str(CONFIG), "--ranks", str(self.ranks), *settings]
        nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
        tasks = [f"--nodes={nodes}", f"--ntasks={self.ranks}", f"--ntasks-per-node={self.ranks // nodes}"]
        attempt = self.folder / f"{name}_ranks"
        attempt.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, "-m", "grpo_mp.cli.slurm_task", str(attempt), str(CONFIG), *settings]
        return ["srun", *tasks, "--kill-on-bad-exit=1", "--cpu-bind=none", *program]


@dataclass(frozen=True)
class Check:
    """A check. `run` returns the measured values as text, or raises UserError with advice."""

    name: str
    run: Callable[[], str]


def main() -> None:
    """Run the command line."""
    try:
        args = _parser().parse_args()
        ranks = args.ranks or max(1, torch.cuda.device_count() * int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
        checks = list_checks(Machine(ranks, args.out))
        if unknown := {*(args.only or ())} - {check.name for check in checks}:
            raise UserError(f"--only {min(unknown)}: the checks are {', '.join(check.name for check in checks)}")
        failed = run_checks([check for check in checks if not args.only or check.name in args.only])
    except UserError as error:
        exit_with(error)
    sys.exit(1 if failed else 0)


def run_checks(checks: Sequence[Check]) -> list[str]:
    """Run the checks and print one line for each; return the names of the failed checks."""
    failed = []
    for check in checks:
        started = time.monotonic()
        try:
            result = check.run()
        except UserError as error:
            failed.append(check.name)
            result = f"FAILED: {error}"
        print(f"{check.name:13} {time.monotonic() - started:5.0f} s  {result}", flush=True)
    print(f"FAILED: {', '.join(failed)}" if failed else "PASSED")
    return failed


def list_checks(machine: Machine) -> list[Check]:
    """Return all checks for this machine, in order of execution."""
    model = {family: f"model.path={machine.folder / family}" for family in GPU_SHAPES}
    checks = [
        Check("machine", partial(check_machine, machine)),
        Check("models", partial(make_models, machine.folder)),
        Check("engine", partial(check_engine, machine, model["qwen3_moe"])),
    ]
    for name, settings in job_settings(machine.ranks).items():
        family = "deepseek_v3" if name.startswith("deepseek") else "qwen3_moe"
        checks.append(Check(name, partial(train, machine, name, [*settings, model[family]])))
    return [
        *checks,
        Check("kill", partial(kill_and_resume, machine, [model["qwen3_moe"]])),
        Check("export", partial(describe_export, machine.folder / "kill/final")),
        Check("rates", partial(write_rates, machine)),
    ]


def job_settings(ranks: int) -> dict[str, list[str]]:
    """Return the settings of the training jobs by name: every schedule, and FP8 engines on GPUs that support FP8.

    Engines load weights by CUDA IPC; those with ranks of their own first get them over NCCL.
    """
    expert = math.gcd(ranks, 8)
    jobs = {
        "colocated": [f"layout.expert={expert}"],
        "deepseek": [f"layout.expert={expert}"],
    }
    if ranks > 1:
        own_ranks = [f"engine.ranks={ranks // 2}", f"layout.expert={math.gcd(ranks - ranks // 2, 8)}"]
        jobs["one_step_off"] = ["schedule=one_step_off", *own_ranks]
        jobs["async"] = ["schedule=async", "rollout.max_staleness=2", *own_ranks]
    if (platform.compute_capability() or 0) >= 9:
        in_fp8 = [name for name in ("deepseek", "one_step_off") if name in jobs]
        jobs |= {f"{name}_fp8": [*jobs[name], "engine.args={quantization: fp8}"] for name in in_fp8}
    return jobs


def check_machine(machine: Machine) -> str:
    """Run `grpo-mp doctor machine`."""
    run_command([sys.executable, "-m", "grpo_mp", "doctor", "machine"], machine.folder / "machine.log")
    return f"fit to train; see {machine.folder / 'machine.log'}"


def make_models(folder: Path) -> str:
    """Write the data, and make the models that do not exist yet."""
    train, held_out = make_problems(2000, 64, seed=0, largest=29, kinds=("add",))
    write_jsonl(train, folder / "train.jsonl")
    write_jsonl(held_out, folder / "eval.jsonl")
    for family, shape in GPU_SHAPES.items():
        if not (folder / family / "config.json").is_file():
            size = shape if platform.on_cuda() else {"num_hidden_layers": 2}
            make_tiny(folder / family, family, make_tokenizer(vocabulary_words()), **size)
    return ", ".join(GPU_SHAPES)


def check_engine(machine: Machine, model: str) -> str:
    """Measure an engine; write the rate of its decoding for `write_rates`, and return all measurements."""
    on_cuda = platform.on_cuda()
    workload = Workload(16, 8, 64, 512) if on_cuda else Workload(2, 4, 16, 32)
    lengths = [f"max_prompt_tokens={workload.prompt_tokens}", f"max_response_tokens={workload.response_tokens}"]
    overrides = [*common_settings(machine, "engine", STEPS), model, *(f"rollout.{length}" for length in lengths)]
    settings = load_settings(CONFIG, overrides, dtype=platform.default_dtype())
    measured = measure_engine(settings, workload, machine.folder / "engine.log")
    planned = planned_engine(settings, read_cluster(shipped_profile()))
    check_sleep(measured, planned)
    layers = HfConfig.read(settings.model.path).int("num_hidden_layers")
    rate = decode_gb_s(measured, workload, planned, layers) if on_cuda else None
    (machine.folder / DECODING).write_text(json.dumps(rate))
    return describe(measured)


def common_settings(machine: Machine, name: str, steps: int) -> list[str]:
    """Return the settings that all training jobs share."""
    folder = machine.folder
    return [
        f"run.folder={folder / name}",
        f"run.steps={steps}",
        "run.eval_every=0",
        "run.save_every=1",
        f"data.train={folder / 'train.jsonl'}",
        f"data.eval={{arithmetic: {{path: {folder / 'eval.jsonl'}, max_prompts: 4}}}}",
        f"rollout.prompts_per_step={max(8, machine.ranks)}",
    ]


def train(machine: Machine, name: str, settings: Sequence[str]) -> str:
    """Train for a few steps; return the summary of the run."""
    arguments = [*common_settings(machine, name, STEPS), *settings]
    run_command(machine.train_command(name, arguments), machine.folder / f"{name}.log")
    return summarize(read_metrics(machine.folder / name / METRICS), STEPS)


def kill_and_resume(machine: Machine, settings: Sequence[str]) -> str:
    """Kill a run after its second step and start it again; check that no step is missing."""
    arguments = [*common_settings(machine, "kill", 2 * STEPS), f"layout.expert={math.gcd(machine.ranks, 8)}", *settings]
    command = machine.train_command("kill", arguments)
    log = machine.folder / "kill.log"
    run = machine.folder / "kill"
    with start(command, log) as job:
        while len(read_metrics(run / METRICS)) <= 2:  # steps 0 to 2
            if job.poll() is not None:
                raise UserError(f"the run ended before the kill: {last_error(log)}")
            time.sleep(0.2)
        os.killpg(job.pid, signal.SIGKILL)
    killed_at = int(read_metrics(run / METRICS)[-1]["step"])
    run_command(command, log)
    return f"killed after step {killed_at}; {summarize(read_metrics(run / METRICS), 2 * STEPS)}"


def describe_export(folder: Path) -> str:
    """Check that the exported policy can be read as a Hugging Face folder; return its path."""
    run_command(
        [sys.executable, "-m", "grpo_mp", "convert", "check", str(folder), str(folder)], folder.parent / "export.log"
    )
    return str(folder)


def write_rates(machine: Machine) -> str:
    """Measure the rates of this machine and write a cluster profile; return its path and the main rates."""
    shipped = yaml.safe_load(PROFILES.read_text(encoding="utf-8"))[shipped_profile()]
    profile = shipped | measure_rates(machine.folder)
    decoding = machine.folder / DECODING
    file = machine.folder / "cluster.yaml"
    if rate := json.loads(decoding.read_text()) if decoding.is_file() else None:
        share = min(1.0, rate / profile["device_memory_gb_s"])
        profile["achievable"] = profile["achievable"] | {"device_memory": float(f"{share:.2g}")}
    file.write_text(yaml.safe_dump(profile), encoding="utf-8")
    rates = ("bf16_tflops", "device_memory_gb_s", "host_link_gb_s", "disk_gb_s")
    return f"{file}: {', '.join(f'{name} {profile[name]:.3g}' for name in rates)}"


def summarize(lines: Sequence[Mapping[str, float]], steps: int) -> str:
    """Return the last step's difference between engine and policy and its speed; check that no step is missing.

    Step 0 is the first evaluation.
    """
    done = [int(line["step"]) for line in lines]
    if done != [*range(steps + 1)]:
        raise UserError(f"metrics.jsonl has the steps {done}, not 0 to {steps}: see the log beside the run")
    last = lines[-1]
    check = f"sync check {last['sync/check/logprob_abs_diff/mean']:.1e} of {last['sync/check/limit']:.1e} nats"
    decode = f"decode against training {last['mismatch/logprob_abs_diff/mean']:.1e} nats"
    decoded = last["speed/generate_tokens_per_s"]
    synced = last["sync/bytes_per_s"] / 1e9
    return f"{check}, {decode}, {decoded:.0f} tokens/s, sync {synced:.2g} GB/s, step {last['time/step_s']:.1f} s"


def run_command(command: Sequence[str], log: Path) -> None:
    """Run a command and append its output to `log`. Raises UserError with the last error if the command fails."""
    with start(command, log) as job:
        try:
            status = job.wait(JOB_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise UserError(f"no end within {JOB_LIMIT_S:.0f} s: {log}") from None
    if status:
        raise UserError(f"{last_error(log)} (status {status}, {log})")


def start(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command in its own process group and append its output to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        environment = {**os.environ, "COLUMNS": "200"}
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)


def last_error(log: Path) -> str:
    """Return the last line of a log that reports an error, or else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "srun: error"))]
    return next(iter([*errors[-1:], *lines[-1:]]), "no output")


def _parser() -> Parser:
    parser = Parser("python -m tools.smoke", __doc__ or "")
    parser.add_argument("--ranks", type=positive_int, help="of all nodes; one for each GPU by default")
    parser.add_argument("--out", type=Path, default=Path("runs/smoke"), help="folder of models, runs and logs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks to run")
    return parser


def shipped_profile() -> str:
    """Return the name of the shipped profile that fits this machine's GPUs; that of an H100 if none does."""
    return cluster_of(torch.cuda.get_device_name() if platform.on_cuda() else "cpu") or "h100-80"


def cluster_of(device: str) -> str | None:
    """Return the shipped profile that fits a CUDA device name such as "NVIDIA H100 80GB HBM3", or None."""
    known = {name: name.split("-") for name in cluster_names()}
    words = device.upper().replace("-", " ").split()
    fitting = [name for name, parts in known.items() if parts[0].upper() in words]
    by_memory = [name for name in fitting if any(word.startswith(known[name][-1]) for word in words)]
    return next(iter([*by_memory, *fitting]), None)


if __name__ == "__main__":
    main()
