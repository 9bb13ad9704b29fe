#!/usr/bin/env bash
# The ranks of one node under torchrun, as a task of Slurm: torchrun_node.sh PYTHON RANKS ATTEMPT CONFIG [setting ...]
set -euo pipefail

python=$1 ranks=$2 attempt=$3
shift 3
module=$("$python" -m grpo_mp.launch.job module "$1")
trap '' USR1 # asks the ranks to save; the agent must outlive it
exec "$python" -m torch.distributed.run --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" \
  --nproc-per-node="$ranks" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
  --log-dir="$attempt/torchrun" -m "$module" "$@"
