#!/usr/bin/env bash
# Lint, types and tests on two CPU cores: bash tests/run.sh [--all | --nightly] [pytest arguments]
# --all adds the slow tests: four ranks, every model, a run of each kind, Slurm. CI runs these.
# --nightly adds to them what takes minutes each: kills, full disks, lost nodes, engines that come back.
# Property tests draw the same cases everywhere; --fresh-draws draws others, --hypothesis-seed=N those of N again.
# Three processes run them, one more than cores, since tests that start ranks often wait; tests that share what they start
# are in one of them. -n 0: one process.
# Makes .venv where it is missing; VENV names another environment.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
bin=$venv/bin
case ${1:-} in
  --all) shift && set -- -m "not nightly" "$@" ;;
  --nightly) shift && set -- -m "" "$@" ;;
esac
bash launch/install.sh --test "$venv"

export OMP_NUM_THREADS=1        # ranks and engines share the cores
export TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1         # every model and data set is made here

"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/shellcheck" launch/*.sh tests/*.sh .ci/run
types=$(mktemp)
"$bin/mypy" >"$types" 2>&1 & # on one core, while tests are collected and begin; said at the end
mypy=$!
status=0
"$bin/python" -m pytest -n 3 --no-loadscope-reorder "$@" || status=$?
wait "$mypy" || status=$((status ? status : 1))
cat "$types"
rm "$types"
exit "$status"
