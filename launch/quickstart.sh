#!/usr/bin/env bash
# From a clone to a policy trained by GRPO, on two CPU cores: `bash launch/quickstart.sh [section.key=value ...]`.
# Makes .venv, a tiny DeepSeek-V3-shaped model with a cold start, its data, and runs/quickstart. A second run resumes
# from what is there. SEED=1 takes another seed, RUN=runs/other another run folder, VENV=folder another environment.
set -euo pipefail
cd "$(dirname "$0")/.."

seed=${SEED:-0}
run=${RUN:-runs/quickstart}
model=checkpoints/tiny_deepseek_v3_seed$seed
data=data/arithmetic_seed$seed
venv=${VENV:-.venv}
grpo_mp=$venv/bin/grpo-mp

bash launch/install.sh "$venv"

if [ ! -f "$model/config.json" ]; then
  echo "quickstart: makes a tiny DeepSeek-V3 and teaches it the form of an answer (two minutes)"
  "$venv/bin/python" -m tools.tiny.make --family deepseek_v3 --out "$model" --data "$data" --seed "$seed" --cold-start 0.4
fi

echo "quickstart: GRPO with two ranks and two engines; engine logs are in $run/logs"
"$grpo_mp" train configs/tiny_moe.yaml --ranks 2 \
  "run.folder=$run" "run.seed=$seed" "model.path=$model" \
  "data.train=$data/train.jsonl" "data.eval={arithmetic: {path: $data/eval.jsonl, samples: 4}}" "$@"
