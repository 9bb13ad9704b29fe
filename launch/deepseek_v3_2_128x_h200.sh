#!/usr/bin/env bash
# DeepSeek-V3.2 671B on 16 nodes of 8 GPUs of 141 GB: sbatch launch/deepseek_v3_2_128x_h200.sh [section.key=value ...]
#SBATCH --job-name=deepseek_v3_2_128x_h200 --nodes=16 --ntasks-per-node=8 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --requeue --open-mode=append --signal=B:USR1@1800 --time=1-00:00:00
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" && source launch/common.sh
start configs/deepseek_v3_2_128x_h200.yaml "$@"
