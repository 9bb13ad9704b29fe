#!/usr/bin/env bash
# GLM-4.5-Air on 4 nodes of 8 GPUs of 80 GB: sbatch launch/glm_4_5_air.sh [section.key=value ...]
#SBATCH --job-name=glm_4_5_air
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@900
#SBATCH --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/glm_4_5_air.yaml "$@"
