#!/usr/bin/env bash
# GLM-4.7-Flash on one node of 8 GPUs of 80 GB: sbatch launch/glm_4_7_flash.sh [section.key=value ...]
#SBATCH --job-name=glm_4_7_flash --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@900 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/glm_4_7_flash.yaml "$@"
