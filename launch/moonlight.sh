#!/usr/bin/env bash
# Moonlight-16B-A3B on 2 nodes of 8 GPUs of 80 GB: sbatch launch/moonlight.sh [section.key=value ...]
#SBATCH --job-name=moonlight --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@900 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/moonlight.yaml "$@"
