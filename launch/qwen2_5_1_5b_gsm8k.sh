#!/usr/bin/env bash
# GRPO on Qwen2.5-1.5B-Instruct and GSM8K, one node of 8 GPUs of 80 GB: sbatch launch/qwen2_5_1_5b_gsm8k.sh [section.key=value ...]
#SBATCH --job-name=qwen2_5_1_5b_gsm8k --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@900 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/qwen2_5_1_5b_gsm8k.yaml "$@"
