#!/usr/bin/env bash
# MiniMax-M2 on 8 nodes of 8 GPUs of 80 GB: sbatch launch/minimax_m2.sh [section.key=value ...]
#SBATCH --job-name=minimax_m2 --nodes=8 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@900 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/minimax_m2.yaml "$@"
