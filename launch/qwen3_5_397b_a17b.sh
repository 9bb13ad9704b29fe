#!/usr/bin/env bash
# Qwen3.5-397B-A17B on 16 nodes of 8 GPUs of 80 GB: sbatch launch/qwen3_5_397b_a17b.sh [section.key=value ...]
#SBATCH --job-name=qwen3_5_397b_a17b --nodes=16 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@1800 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/qwen3_5_397b_a17b.yaml "$@"
