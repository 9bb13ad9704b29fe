#!/usr/bin/env bash
# Supervised fine-tuning on two nodes of one CPU rank each: sbatch launch/tiny_sft.sh [section.key=value ...]
#SBATCH --job-name=tiny_sft --nodes=2 --ntasks-per-node=1
#SBATCH --requeue --open-mode=append --signal=B:USR1@120
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/tiny_sft.yaml "$@"
