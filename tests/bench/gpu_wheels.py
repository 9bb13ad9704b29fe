"""Load the locked packages for GPUs on a machine without a GPU: python -m tests.bench.gpu_wheels FOLDER [CHECK ...]

Installs launch/requirements-gpu.txt into FOLDER/venv (10 GB, once; PYTHON312 names another python3.12), without
transformer-engine-torch, which has no wheel. Then, on Linux with gcc and no driver, it checks:

- resolve: the loader finds the libraries of every shared object, in the environments of trainer and engine.
- headers: the first command of launch/README.md installs the headers that TransformerEngine's extension needs.
- start: a process with the engine's preload starts, and the nvcc of pip compiles a kernel.
- imports: modules with CUDA kernels, and SGLang's scheduler, server and models, load as on an H100.
- recipes: the engine of every recipe starts, and ends at the first call that needs a GPU, which it names.

The first three use the unmodified CUDA runtime and a driver whose functions fail, the others a runtime that answers as
eight H100s: its device memory is host memory, and kernels do nothing. The exit status is 1 if a check failed.
Not reached: process groups, kernels, graphs, IPC, sleep, TransformerEngine's extension, and so the trainer's modules.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_WHEEL = "transformer-engine-torch"
# Libraries of other systems and of CUDA 12, and those that a package's Python code loads by path.
OPTIONAL = re.compile(
    r"lib(mpi|pmix|fabric|ucp|ucs|oshmem|ibverbs|mlx5|rdmacm|av|sw|efa|gdrapi|tbb|cufile_rdma|cudart\.so\.12)"
    r"|lib(cudnn_|tvm_ffi|torchcodec_core|opencv|triton)"
)
MODULES = (
    *("torch_memory_saver", "sgl_kernel", "deep_gemm", "deep_ep", "flash_mla", "flashinfer", "flash_attn.cute"),
    *("fla.ops.gated_delta_rule", "transformer_engine.common", "sglang.srt.managers.scheduler"),
    *("sglang.srt.model_executor.model_runner", "sglang.srt.entrypoints.http_server"),
    *(
        f"sglang.srt.models.{name}"
        for name in ("deepseek_nextn", "glm4_moe", "qwen3_moe", "qwen3_5", "llama", "mixtral")
    ),
)
# That TransformerEngine's sources include, and that the headers of CUDA include in turn.
BUILD_HEADERS = (
    *("cuda_runtime.h", "cuda_fp16.h", "cuda_fp8.h", "cublasLt.h", "crt/host_defines.h", "nv/target"),
    *("nccl.h", "cudnn.h", "torch/extension.h"),
)
FAILING = "int {name}() {{ return 100; }}\n"  # CUDA_ERROR_NO_DEVICE
SILENT = "int {name}() {{ return 0; }}\n"
DRIVER = (
    "int cuDriverGetVersion(int *v) { *v = 13000; return 0; }\nint cuDeviceGetCount(int *n) { *n = 8; return 0; }\n"
)
NVIDIA_SMI = """#!/bin/sh
case $* in *compute_cap*) answer=9.0 ;; *) answer=81559 ;; esac
for _ in 1 2 3 4 5 6 7 8; do echo $answer; done
"""
RUNTIME = r"""
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define TOTAL 85520809984UL
#define NEEDS_GPU if (refused(__func__)) return cudaErrorDevicesUnavailable;
static int refused(const char *call) {
  if (!getenv("GRPO_MP_REFUSE_GPUS")) return 0;
  dprintf(2, "refused: %s\n", call);
  sleep(3);  // the first scheduler that fails ends the others, which shall arrive before
  return 1;
}
static __thread int current;
static const int attributes[512] = {[1] = 1024, [8] = 49152, [10] = 32, [12] = 65536, [16] = 132, [39] = 2048,
                                    [75] = 9, [81] = 233472, [82] = 65536, [97] = 232448};
cudaError_t cudaGetDeviceCount(int *n) { *n = 8; return 0; }
cudaError_t cudaGetDevice(int *d) { *d = current; return 0; }
cudaError_t cudaSetDevice(int d) { NEEDS_GPU current = d; return 0; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attributes[a]; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->totalGlobalMem = TOTAL;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlockOptin = 232448;
  p->uuid.bytes[0] = d + 1;
  return 0;
}
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *f = TOTAL - (1UL << 30); *t = TOTAL; return 0; }
cudaError_t cudaMalloc(void **p, size_t n) {
  NEEDS_GPU
  *p = aligned_alloc(512, (n + 511) / 512 * 512);
  return *p ? 0 : 2;
}
cudaError_t cudaFree(void *p) { free(p); return 0; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { return cudaMalloc(p, n); }
cudaError_t cudaFreeHost(void *p) { free(p); return 0; }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) {
  NEEDS_GPU
  return memcpy(d, s, n) ? 0 : 1;
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) { NEEDS_GPU memset(d, v, n); return 0; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  NEEDS_GPU
  *s = malloc(64);
  return 0;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = malloc(64); return 0; }
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) { NEEDS_GPU return 0; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { NEEDS_GPU return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *p) { *p = 0; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
const char *cudaGetErrorName(cudaError_t e) { return "cudaErrorWithoutGPU"; }
const char *cudaGetErrorString(cudaError_t e) { return "an error of a runtime without a GPU"; }
void **__cudaRegisterFatBinary(void *f) { static void *handle[4]; return handle; }
char __cudaInitModule(void **h) { return 1; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *s, void **p, unsigned v, unsigned long long f, enum cudaDriverEntryPointQueryResult *r) {
  *p = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), s);
  if (r) *r = *p ? 0 : 1;
  return 0;
}
"""


def main() -> None:
    """Install, make the stand-ins, and run the checks."""
    folder, *chosen = sys.argv[1:]
    venv = Path(folder).absolute() / "venv"
    install(venv)
    packages = next((venv / "lib").glob("python3.*")) / "site-packages"
    stubs = make_stubs(packages / "nvidia" / "cu13", venv.parent / "stubs")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        checks: dict[str, Callable[[], list[str]]] = {
            "resolve": lambda: check_resolution(venv, packages, stubs),
            "headers": lambda: run_inside(
                venv, stubs / "driver", HEADERS, json.dumps([first_packages(), BUILD_HEADERS])
            ),
            "start": lambda: run_inside(venv, stubs / "driver", START),
            "imports": lambda: run_inside(venv, stubs, IMPORTS, json.dumps(MODULES), answers=True),
            "recipes": lambda: run_inside(venv, stubs, RECIPES, recipe_specs(Path(scratch), venv.parent), answers=True),
        }
        for name in chosen or checks:
            failures = checks[name]()
            failed |= bool(failures)
            print(f"{name}: {'; '.join(failures) or 'passed'}", flush=True)
    sys.exit(failed)


def install(venv: Path) -> None:
    """Install the locked packages, unless these were installed before, what else TransformerEngine needs, and this."""
    lock = (ROOT / "launch" / "requirements-gpu.txt").read_text()
    wheels = "".join(line for line in lock.splitlines(keepends=True) if not line.startswith(WITHOUT_WHEEL))
    stamp = venv / "installed.txt"
    pip = [venv / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    if not stamp.is_file() or stamp.read_text() != wheels:
        subprocess.run([os.environ.get("PYTHON312", "python3.12"), "-m", "venv", venv], check=True)
        requirements = venv / "requirements.txt"
        requirements.write_text(wheels)
        subprocess.run([*pip, "-r", requirements], check=True)
        requirements.rename(stamp)
    # SGLang finds the plugin of this project by its metadata.
    subprocess.run([*pip, "--no-build-isolation", *first_packages(), "-e", ROOT], check=True)


def make_stubs(cuda: Path, folder: Path) -> Path:
    """Compile folder/driver/libcuda.so.1, which fails, and folder/libcuda.so.1 and libcudart.so.13, which answer.

    Also writes folder/nvidia-smi, by which SGLang asks for the memory of GPUs.
    """
    (folder / "driver").mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    command = ["nm", "-D", "--defined-only", cuda / "lib" / "libcudart.so.13"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    driver = set(re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", (cuda / "include" / "cuda.h").read_text()))
    for file, names, template, answers in (
        ("driver/libcuda.so.1", driver, FAILING, ""),
        ("libcuda.so.1", driver, SILENT, DRIVER),
        ("libcudart.so.13", set(re.findall(r" T (\w+)@", listed)), SILENT, RUNTIME),
    ):
        library = folder / file
        versions = folder / f"{file}.map"
        sources = [folder / f"{file}.rest.c", folder / f"{file}.answers.c"]
        versions.write_text(f"{library.name} {{ global: *; }};\n" if answers is RUNTIME else "{ global: *; };\n")
        rest = names - set(re.findall(r"\b(\w+)\([^()]*\)\s*\{", answers))
        sources[0].write_text("".join(template.format(name=name) for name in sorted(rest)))
        sources[1].write_text(answers)
        linker = f"-Wl,-soname,{library.name},--version-script={versions}"
        options = ["-shared", "-fPIC", "-w", f"-I{cuda / 'include'}", linker, "-o", library]
        subprocess.run(["gcc", *options, *sources, "-ldl"], check=True)
    return folder


def check_resolution(venv: Path, packages: Path, stubs: Path) -> list[str]:
    """Return the shared objects whose libraries the loader does not find, as trainer or as engine."""
    command = [venv / "bin/python", "-c", "import torch; print(open('/proc/self/maps').read())"]
    driver = {"LD_LIBRARY_PATH": str(stubs / "driver")}
    loaded = subprocess.run(command, env=driver, capture_output=True, text=True, check=True).stdout
    by_torch = set(re.findall(r"/([^/\s]+\.so[^/\s]*)$", loaded, re.MULTILINE))
    objects = [file for file in packages.rglob("*.so*") if file.is_file() and not file.is_symlink()]
    paths = {"trainer": f"{stubs / 'driver'}", "engine": f"{stubs / 'driver'}:{packages / 'nvidia/cu13/lib'}"}

    def missing(file: Path, role: str) -> str:
        environment = {**os.environ, "LD_LIBRARY_PATH": paths[role]}
        ended = subprocess.run(["ldd", file], env=environment, capture_output=True, text=True)
        names = re.findall(r"(\S+) => not found", ended.stdout)
        names = [name for name in names if name not in by_torch and not OPTIONAL.match(name)]
        return f"{role}: {file.relative_to(packages)} needs {', '.join(names)}" if names else ""

    with ThreadPoolExecutor(2) as pool:
        return [
            *filter(None, pool.map(lambda case: missing(*case), [(file, role) for role in paths for file in objects]))
        ]


START = """
from grpo_mp.platform import cuda_libraries
nowhere = cuda_libraries.Path("/nowhere")
environment = dict(os.environ, PATH="/usr/bin:/bin")
environment.pop("CUDA_HOME")
environment |= cuda_libraries.cuda_environment(environment, nowhere)
environment["LD_LIBRARY_PATH"] += ":" + os.environ["LD_LIBRARY_PATH"]
cuda_libraries.check_compiler(environment, nowhere)
from torch_memory_saver.utils import get_binary_path_from_package
preload = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
cuda_libraries.check_preload(cuda_libraries.Path(preload), environment)
"""
HEADERS = """
from importlib.metadata import distribution
from packaging.requirements import Requirement
chosen, headers = json.load(sys.stdin)
found, waiting = {}, [Requirement(name) for name in chosen]
while waiting:
    requirement = waiting.pop()
    key = requirement.name, *sorted(requirement.extras)
    if key not in found:
        package = distribution(requirement.name)
        found[key] = [str(file) for file in package.files]
        for required in map(Requirement, package.requires or ()):
            if not required.marker or any(required.marker.evaluate({"extra": extra}) for extra in ("", *key[1:])):
                waiting.append(required)
def check(header):
    places = [file for files in found.values() for file in files if file.endswith(f"/include/{header}")]
    assert any(file.startswith(("nvidia/", "torch/")) for file in places), "no package has it"
for header in headers:
    run(header, lambda: check(header))
"""
IMPORTS = """
import importlib, torch
assert torch.cuda.is_available() and torch.empty(3, device="cuda").is_cuda
sys.modules["megatron"] = None  # as the engine's plugin does
for name in json.load(sys.stdin):
    run(name, lambda: importlib.import_module(name))
"""
RECIPES = """
from tests.bench.gpu_engines import main
main()
"""
HEAD = """
import json, os, sys
def run(name, function):
    try:
        function()
    except BaseException as error:
        print(f"FAILED {name}: {type(error).__name__}: {error}".replace(chr(10), " ")[:300], flush=True)
"""


def run_inside(venv: Path, libraries: Path, program: str, data: str = "", answers: bool = False) -> list[str]:
    """Run a program in the environment; return its lines that begin with FAILED, or its last error.

    Prints its lines that begin with "reached".
    """
    packages = next((venv / "lib").glob("python3.*")) / "site-packages"
    cuda = packages / "nvidia" / "cu13"
    preloaded = [str(library) for library in (libraries / "libcudart.so.13",) if answers]
    if program is RECIPES:  # its processes are forks, so the library that engines preload is loaded here
        preloaded = [*map(str, packages.glob("torch_memory_saver_hook_mode_preload_cu13.*")), *preloaded]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{libraries}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{libraries}:{cuda / 'lib'}" if answers else str(libraries),
        "CUDA_HOME": str(cuda),
        **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
    }
    ended = subprocess.run(
        [venv / "bin/python", "-P", "-c", HEAD + program], env=environment, input=data, capture_output=True, text=True
    )
    lines = ended.stdout.splitlines()
    failures = [line for line in lines if line.startswith("FAILED")]
    print(*(f"{line}\n" for line in lines if line.startswith("reached")), sep="", end="")
    return [*failures, *([ended.stderr.strip().splitlines()[-1]] if ended.returncode else [])]


def first_packages() -> list[str]:
    """Return the packages of the first `pip install` of launch/README.md."""
    command = next(line for line in (ROOT / "launch/README.md").read_text().splitlines() if "/pip install" in line)
    return command.partition(" install ")[2].replace("-c launch/requirements-gpu.txt", "").split()


def recipe_specs(scratch: Path, folder: Path) -> str:
    """Return what `gpu_engines` reads. `scratch`: for the config.json of the recipes' models; `folder`: for logs."""
    from grpo_mp.config import load_settings
    from grpo_mp.planner.model_configs import find_config
    from tests.recipes import FULL_SIZE
    from tests.rollout.specs import first_engine

    settings = {path.stem: load_settings(path) for path in FULL_SIZE}
    specs = {
        name: asdict(first_engine(each, find_config(each.model.path)[0], scratch / name))
        for name, each in settings.items()
    }
    return json.dumps({"folder": folder / "engines", "specs": specs}, default=str)


if __name__ == "__main__":
    main()
