#!/usr/bin/env bash
# DeepSeek-R1 671B on 16 nodes of 8 GPUs of 80 GB: sbatch launch/moe_671b.sh [section.key=value ...]
#SBATCH --job-name=moe_671b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@1800
#SBATCH --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/moe_671b.yaml "$@"
