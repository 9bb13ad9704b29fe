#!/usr/bin/env bash
# GLM-5.2 744B on 32 nodes of 8 GPUs of 80 GB: sbatch launch/glm_5_256x_h100.sh [section.key=value ...]
#SBATCH --job-name=glm_5_256x_h100 --nodes=32 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@1800 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/glm_5_256x_h100.yaml "$@"
