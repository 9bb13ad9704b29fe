#!/usr/bin/env bash
# The first twenty minutes on real GPUs: tries the whole loop with random models, and measures what plans assume.
# One machine: bash launch/smoke.sh [--ranks N]       Slurm: sbatch --nodes=2 --gpus-per-node=8 launch/smoke.sh
#SBATCH --job-name=smoke --nodes=1 --exclusive --time=01:00:00
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

if [ -n "${SITE:-}" ]; then
  # shellcheck source=/dev/null
  source "$SITE"
fi
python=${VENV:-.venv}/bin/python
if [ "${SLURM_JOB_NUM_NODES:-1}" -gt 1 ]; then
  MASTER_ADDR=$(hostname)
  export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 60 * 200))
fi
exec "$python" -m tools.smoke "$@"
