#!/usr/bin/env bash
# gpt-oss-120b on 4 nodes of 8 GPUs of 80 GB: sbatch launch/gpt_oss_120b.sh [section.key=value ...]
#SBATCH --job-name=gpt_oss_120b --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@900 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/gpt_oss_120b.yaml "$@"
