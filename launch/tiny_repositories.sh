#!/usr/bin/env bash
# The settings of the small repositories on two nodes of one CPU rank each: sbatch launch/tiny_repositories.sh [section.key=value ...]
#SBATCH --job-name=tiny_repositories --nodes=2 --ntasks-per-node=1
#SBATCH --requeue --open-mode=append --signal=B:USR1@120
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/tiny_repositories.yaml "$@"
