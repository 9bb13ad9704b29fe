#!/usr/bin/env bash
# Qwen3-235B-A22B on 8 nodes of 8 GPUs of 80 GB: sbatch launch/qwen3_235b_a22b.sh [section.key=value ...]
#SBATCH --job-name=qwen3_235b_a22b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@1800
#SBATCH --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/qwen3_235b_a22b.yaml "$@"
