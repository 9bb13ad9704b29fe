#!/usr/bin/env bash
# Any settings file on nodes of 8 GPUs: sbatch --nodes=4 launch/slurm.sh CONFIG [section.key=value ...]
#SBATCH --job-name=grpo_mp --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@1800 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start "$@"
