#!/usr/bin/env bash
# Makes the CPU environment: bash launch/install.sh [--gpu-versions] [--test] [FOLDER]     (FOLDER is .venv by default)
# --test adds what tests/run.sh needs, --gpu-versions takes the versions that GPUs get, 3 GB with the libraries that a
# CUDA build of torch loads. A second run skips what is there. PYTHON names another interpreter: 3.11, 3.12 or 3.13.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cpu_index=https://download.pytorch.org/whl/cpu

fail() {
  echo "error: $*" >&2
  exit 1
}

# The interpreter that PYTHON names, or the first of the usual ones that is of a tested version.
find_python() {
  local candidate version
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    version=$("$candidate" -c 'import sys; print(sys.version_info.major, sys.version_info.minor, sep=".")' 2>/dev/null) ||
      continue
    case $version in
      3.11 | 3.12 | 3.13) ;;
      *)
        [ -n "${PYTHON:-}" ] || continue
        fail "$candidate is Python $version: set PYTHON to a 3.11, 3.12 or 3.13"
        ;;
    esac
    "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
      fail "$candidate cannot make environments: install its venv module (Debian: apt-get install python3-venv)"
    echo "$candidate"
    return
  done
  [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON does not run: set it to a Python 3.11, 3.12 or 3.13"
  fail "no Python 3.11, 3.12 or 3.13 was found: install python3.11 (Debian: apt-get install python3.11 python3.11-venv)"
}

# pip's output as one moving line on a terminal, as silence elsewhere.
show_progress() {
  local word name rest count=0
  while read -r word name rest; do
    [ -t 1 ] || continue
    case $word in
      Collecting) count=$((count + 1)) && printf '\r\033[K  %d %s' "$count" "$name" ;;
      Installing) printf '\r\033[K  unpacking' ;;
    esac
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

pip_install() {
  local log=$venv/install.log
  "$venv/bin/python" -m pip install --no-compile --progress-bar off "$@" 2>&1 | tee "$log" | show_progress ||
    fail "pip did not manage; the end of $log: $(tail -n 5 "$log")"
}

# Does pip, as this machine has set it up, find a CPU build of this torch?
offers_cpu_build() {
  "$venv/bin/python" -m pip index versions torch 2>/dev/null | grep -w -- "$1+cpu" >/dev/null
}

# The packages of the CPU set, at the versions of the GPU set where that has them, and what only these need.
gpu_versions() {
  awk -F== '
    /^#/ { next }
    { name = tolower($1); gsub(/[._]/, "-", name) }
    FILENAME == ARGV[1] { gpu[name] = $0 }
    FILENAME == ARGV[1] && name ~ /^(six$|nvidia-(cu|nccl|nvjitlink|nvshmem))/ && name !~ /cutlass|frontend|cccl|crt|nvcc/
    FILENAME == ARGV[2] { print (name in gpu) ? gpu[name] : $0 }
  ' "$root/launch/requirements-gpu.txt" "$root/launch/requirements-cpu.txt"
}

# Torch for the CPU is in PyTorch's index. PyPI's is built for CUDA: it does not even load without the libraries that it
# requires, so where the index cannot be reached these are installed with it.
install_torch() {
  local version libraries
  version=$(sed -n 's/^torch==//p' "$lock")
  if [ "$take_gpu_versions" = yes ] || offers_cpu_build "$version"; then
    pip_install --no-deps "torch==$version"
  else
    pip_install --no-deps --extra-index-url "$cpu_index" "torch==$version"
  fi
  [ "$take_gpu_versions" = no ] || return 0  # they are in the lock
  mapfile -t libraries < <(cuda_libraries)
  if [ ${#libraries[@]} -gt 0 ]; then
    echo "  $cpu_index was not reached: installing the CUDA build of PyPI with its libraries (2.5 GB)"
    pip_install "${libraries[@]}"
  fi
}

# What the installed torch requires of CUDA.
cuda_libraries() {
  "$venv/bin/python" -c 'from importlib.metadata import requires
for requirement in requires("torch"):
    if requirement.startswith(("cuda-", "nvidia-")): print(requirement)'
}

# step TEXT COMMAND...: says what happens, then how long it took.
step() {
  local start=$SECONDS text=$1
  shift
  printf '%s ...\n' "$text"
  "$@"
  printf '  done in %d s\n' $((SECONDS - start))
}

make_venv() {
  local python
  python=$(find_python)
  "$python" -m venv "$venv"
}

stamp_of() {
  { echo "$root" && cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" "$1"; } | sha256sum
}

# unless_there NAME LOCK COMMAND: runs COMMAND unless it was done for these very files before.
unless_there() {
  local stamp=$venv/installed-$1 expected
  expected=$(stamp_of "$2")
  if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$expected" ]; then
    echo "$venv has the $1 packages already"
    return
  fi
  "$3" "$2"
  echo "$expected" >"$stamp"
}

# Loads once what will run: a broken set is found now, and the first start need not compile.
load_all() {
  unset PYTHONDONTWRITEBYTECODE
  export OMP_NUM_THREADS=1
  local log
  "$venv/bin/python" -P -c 'import grpo_mp.train' &
  log=$(SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$root/grpo_mp/platform/engine_site "$venv/bin/python" -P -c \
    'import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry' 2>&1) ||
    fail "SGLang does not load: $log"
  wait $! || fail "grpo_mp does not load"
}

install_cpu() {
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || step "making the environment $venv" make_venv
  step "installing torch for the CPU (190 MB)" install_torch
  step "installing Megatron-Core, SGLang and what they need (480 MB)" pip_install --no-deps -r "$1"
  step "installing grpo_mp itself" pip_install --no-deps --no-build-isolation --editable "$root"
  step "loading trainer and engine once" load_all
}

install_test() {
  step "installing the test tools" pip_install --no-deps -r "$1"
}

# Not where Python finds it: Megatron would take TransformerEngine for usable.
install_te_source() {
  rm -rf "$venv/te-source"
  step "installing TransformerEngine's Python code for the tests" pip_install --no-deps --target "$venv/te-source" -r "$1"
}

take_gpu_versions=no test_too=no
while [[ "${1:-}" = --* ]]; do
  case $1 in
    --gpu-versions) take_gpu_versions=yes ;;
    --test) test_too=yes ;;
    *) fail "$1 is no option of install.sh: it knows --gpu-versions and --test" ;;
  esac
  shift
done
venv=${1:-.venv}
lock=$root/launch/requirements-cpu.txt
if [ "$take_gpu_versions" = yes ]; then
  mkdir -p "$venv"
  lock=$venv/requirements-gpu-versions.txt
  gpu_versions >"$lock"
fi
unless_there cpu "$lock" install_cpu
if [ "$test_too" = yes ]; then
  unless_there test "$root/launch/requirements-test.txt" install_test
  unless_there te-source "$root/launch/requirements-te-source.txt" install_te_source
fi
