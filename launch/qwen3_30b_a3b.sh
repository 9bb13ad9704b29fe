#!/usr/bin/env bash
# Qwen3-30B-A3B on one node of 8 GPUs of 80 GB: sbatch launch/qwen3_30b_a3b.sh [section.key=value ...]
#SBATCH --job-name=qwen3_30b_a3b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900
#SBATCH --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/qwen3_30b_a3b.yaml "$@"
