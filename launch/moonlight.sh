#!/usr/bin/env bash
# Moonlight-16B-A3B on 2 nodes of 8 GPUs of 80 GB: sbatch launch/moonlight.sh [section.key=value ...]
#SBATCH --job-name=moonlight
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900
#SBATCH --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/moonlight.yaml "$@"
