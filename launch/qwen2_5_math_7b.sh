#!/usr/bin/env bash
# Dr. GRPO on Qwen2.5-Math-7B, one node of 8 GPUs of 80 GB: sbatch launch/qwen2_5_math_7b.sh [section.key=value ...]
#SBATCH --job-name=qwen2_5_math_7b
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
start configs/qwen2_5_math_7b.yaml "$@"
