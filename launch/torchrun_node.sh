#!/usr/bin/env bash
# The ranks of one node under torchrun, as a task of Slurm: torchrun_node.sh PYTHON RANKS ATTEMPT CONFIG [setting ...]
set -euo pipefail

trap '' USR1 # asks the ranks to save; it would end an agent that has not begun to hand it on
exec "$1" -m grpo_mp.cli.torchrun_node "${@:2}"
