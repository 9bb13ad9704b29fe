#!/usr/bin/env bash
# Sourced by the batch scripts beside it. `start CONFIG [section.key=value ...]` runs the settings on this allocation:
# checks every node, trains, saves and requeues before the time limit, says first what failed first, and starts again.
# `--dry-run` among the arguments prints what would run. README.md beside this file explains the rest.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 2
}

[ -f launch/common.sh ] || fail "submit from the root of the repository"

# What the site needs: module loads, exports, and `inside=(apptainer exec --nv IMAGE)` to run ranks in a container.
inside=()
if [ -n "${SITE:-}" ]; then
  # shellcheck source=/dev/null
  source "$SITE"
fi
python=${VENV:-.venv}/bin/python
restarts=${RESTARTS:-3} # of a job, requeues included, without a new checkpoint in between; 0: none at all
spares=${SPARES:-0}     # nodes of the allocation that take the place of bad or lost ones
master_addr=${MASTER_ADDR:-} master_port=${MASTER_PORT:-}
bad= # nodes, separated by commas
readonly TRIES=10 # of a call that Slurm's controller does not answer, as while it starts anew
for name in RESTARTS SPARES; do
  [[ ${!name:-0} =~ ^[0-9]{1,4}$ ]] || fail "$name=${!name}: give a number"
done

# retry COMMAND...: shows what it prints, after as many tries as it needs; not 0 where the last one fails, too.
retry() {
  local try text
  for ((try = 1; try <= TRIES; try++)); do
    if text=$("$@"); then
      [ -z "$text" ] || printf '%s\n' "$text"
      return
    fi
    if [ "$try" -lt "$TRIES" ]; then sleep "${RETRY_S:-30}"; fi
  done
  return 1
}

start() {
  config=${1:?give a settings file}
  arguments=()
  local argument dry_run=no
  for argument in "${@:2}"; do
    if [ "$argument" = --dry-run ]; then dry_run=yes; else arguments+=("$argument"); fi
  done
  [ -x "$python" ] || fail "$python is not there: make it with launch/install.sh, or name another with VENV"
  choose_size
  folder=$("$python" -m grpo_mp.cli.slurm_job folder "$config" "${arguments[@]}")
  attempt=$folder/attempts/${SLURM_JOB_ID:-dry}.${SLURM_RESTART_COUNT:-0}
  if [ "$dry_run" = yes ]; then
    set_environment
    set_commands
    show --settings
    printf '%q ' "${check[@]}" && echo
    printf '%q ' "${run[@]}" && echo
    return
  fi
  [ -n "${SLURM_JOB_ID:-}" ] || fail "this is a batch script: sbatch $0, or --dry-run to see what it would do"
  local first=$attempt restart
  again=no # yes: the time limit is near, also where that is said between two attempts
  trap 'again=yes' USR1
  for ((restart = 1; ; restart++)); do
    one_attempt
    if [ "$status" = 0 ]; then return; fi
    if [ "$restarts" = 0 ] || [ "$may_restart" = no ]; then exit "$status"; fi
    if [ "$again" = yes ]; then
      requeue
      return
    fi
    attempt=$first.$restart
  done
}

# Checks the nodes and trains on them; $status is not 0 where a rank failed.
one_attempt() {
  "$python" -m grpo_mp.cli.slurm_job begin --restarts "$restarts" "$attempt" "$config" "${arguments[@]}"
  choose_nodes "$size"
  local shown=$nodes
  set_environment
  show
  echo "restarts so far: ${SLURM_RESTART_COUNT:-0}; logs of ranks: $attempt"
  choose_nodes all
  set_environment
  check_nodes
  choose_nodes "$size"
  set_environment
  set_commands
  [ "$nodes" = "$shown" ] || show
  if [ "$again" = no ]; then train; else requeue; fi
}

# Nodes and ranks on each: of the allocation, or NODES, or as the script's own #SBATCH lines ask for.
choose_size() {
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    size=$((SLURM_JOB_NUM_NODES - spares))
    [ "$size" -ge 1 ] || fail "SPARES=$spares leaves none of the job's $SLURM_JOB_NUM_NODES nodes: ask for more"
    per_node=${SLURM_NTASKS_PER_NODE:-$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))}
  else
    size=${NODES:-$(sed -n 's/^#SBATCH.* --nodes=\([0-9]*\).*/\1/p' "$0")}
    per_node=$(sed -n 's/^#SBATCH.* --ntasks-per-node=\([0-9]*\).*/\1/p' "$0")
    count=$size
    nodes=$(seq -f 'node%g' -s, 0 $((count - 1)))
  fi
}

# choose_nodes COUNT: so many of the allocation's that are up and were not found bad, in $nodes; all: as many as there are.
# Does not return where they are too few: by --no-kill Slurm does not requeue the job that lost them, so it is done here.
choose_nodes() {
  local states unfit
  # Without an answer none counts as down: the check finds those that are.
  states=$(retry sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format='%N %T') || states=
  unfit=$(sed -En 's/ (down|fail|.*\*$).*//p' <<<"$states")
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -Fxv "$unfit"$'\n'"${bad//,/$'\n'}" || true)
  count=$(wc -w <<<"$nodes")
  if [ "$count" -lt "$size" ]; then
    local too_few="of $SLURM_JOB_NODELIST $count nodes are up and fit, the job needs $size"
    # A requeued job may get the bad nodes again.
    [ -z "$bad" ] || fail "$too_few: submit it again with --exclude=$bad, or with --spares; the run resumes"
    [ "$restarts" != 0 ] || fail "$too_few"
    requeue "$too_few"
    exit
  fi
  if [ "$1" != all ]; then count=$1; fi
  nodes=$(head -n "$count" <<<"$nodes" | paste -sd,)
}

# Every port of a job comes from its id: the first of 200 is where ranks meet, the others are for engines.
set_environment() {
  local ports=$((20000 + ${SLURM_JOB_ID:-0} % 60 * 200))
  environment=(
    "MASTER_ADDR=${master_addr:-$(address_of "${nodes%%,*}")}"
    "MASTER_PORT=${master_port:-$ports}"
    "GRPO_MP_PORTS=${GRPO_MP_PORTS:-$((ports + 1))-$((ports + 199))}"
    "OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    "CUDA_DEVICE_MAX_CONNECTIONS=1"
    "NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}"
    "TOKENIZERS_PARALLELISM=false"
    "PYTHONUNBUFFERED=1"
  )
  export "${environment[@]}"
}

# The first node's own name, which is the batch script's host unless that is a bad one.
address_of() {
  if [ "$1" = "${SLURMD_NODENAME:-}" ]; then
    hostname
  elif [ -n "${SLURM_JOB_ID:-}" ]; then
    retry scontrol show node "$1" | sed -n 's/.* NodeHostName=\([^ ]*\).*/\1/p'
  else
    echo "$1"
  fi
}

# The two steps of a job: `check` and `run`, each as srun starts it.
set_commands() {
  # Where a site binds tasks to cores by itself, all of a rank's threads and its engine would share one.
  local cores=(--cpu-bind=none)
  if [ "${SLURM_CPUS_ON_NODE:-0}" -ge "$per_node" ]; then
    cores+=(--cpus-per-task=$((SLURM_CPUS_ON_NODE / per_node)))
  fi
  local on=(--nodes="$count" --nodelist="$nodes" --unbuffered)
  local on_all=(srun --ntasks=$((count * per_node)) --ntasks-per-node="$per_node" "${cores[@]}" "${on[@]}")
  # A rank whose check crashes does not answer, which names its node: the others are killed only after rank 0's timeout.
  check=("${on_all[@]}" --kill-on-bad-exit=0 --wait="${CHECK_WAIT_S:-90}" --output="$attempt/check_%t.log" "${inside[@]}"
    "$python" -m grpo_mp.cli.slurm_nodes "$attempt" "$nodes")
  run=("${on_all[@]}" --kill-on-bad-exit=1 --output="$attempt/rank_%t.log" "${inside[@]}"
    "$python" -m grpo_mp.cli.slurm_task "$attempt" "$config" "${arguments[@]}")
}

show() {
  "$python" -m grpo_mp.cli.slurm_job show --nodes "$nodes" --per-node "$per_node" "$@" "$config" "${arguments[@]}"
  printf '  %s\n' "${environment[@]}"
}

# in_step LOG COMMAND...: runs a step, hands on the signals that Slurm sends to this script; the step's status in $status.
in_step() {
  "${@:2}" 2>>"$1" &
  step=$!
  if [ "$again" = yes ]; then kill -USR1 "$step" 2>/dev/null || true; fi # it was told before there was a step
  wait "$step" || true
  while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done # a signal broke the wait off
  status=0
  wait "$step" || status=$? # which bash remembers; of a wait that a signal broke off it is the signal's
}

check_nodes() {
  if [ "$again" = yes ]; then return; fi
  set_commands
  echo "checks the nodes"
  in_step "$attempt/srun_check.log" "${check[@]}"
  cat "$attempt/check_0.log" 2>/dev/null || true # there is none where srun could not start the check
  [ "$status" = 0 ] && return
  # The time limit's signal may end the check of a good node.
  [ -s "$attempt/bad_nodes" ] || [ "$again" = yes ] || "$python" -m grpo_mp.cli.slurm_job lost-nodes "$attempt"
  if [ -s "$attempt/bad_nodes" ]; then # no later attempt of the job uses them
    bad=$(paste -sd, "$attempt/bad_nodes")${bad:+,$bad}
    return
  fi
  # SIGTERM to all tasks: another job pushes this one aside.
  if [ "$status" = $((128 + 15)) ]; then again=yes; fi
  if [ "$again" = yes ]; then return; fi
  tail -n 5 "$attempt/srun_check.log"
  fail "the check of the nodes failed: $attempt"
}

train() {
  local follower
  # The time limit is near: save, exit, and resume in a new attempt.
  trap 'again=yes; kill -USR1 "$step" 2>/dev/null || true' USR1
  told_to_end=no
  trap 'told_to_end=yes; echo "told to end"; kill -TERM "$step" 2>/dev/null || true' TERM
  tail -n +1 --retry -f "$attempt/rank_0.log" 2>/dev/null &
  follower=$!
  in_step "$attempt/srun.log" "${run[@]}"
  sleep 1
  kill "$follower" 2>/dev/null || true # it may have been ended with the job
  if [ "$status" = 0 ]; then
    # Slurm tells the ranks of a job that others push aside, not this script, and they have saved.
    if [ "$told_to_end" = no ] && has_steps_left; then requeue; fi
    return
  fi
  local told=()
  if [ "$again" = yes ]; then told=(--told-to-save); fi
  trap 'again=yes' USR1 # there is no step to tell
  trap - TERM
  may_restart=yes
  "$python" -m grpo_mp.cli.slurm_job failure "${told[@]}" "$attempt" "$config" "${arguments[@]}" || may_restart=no
  if [ "$told_to_end" = yes ]; then exit "$status"; fi
}

has_steps_left() {
  "$python" -m grpo_mp.cli.slurm_job has-steps-left "$config" "${arguments[@]}"
}

# requeue [REASON]
requeue() {
  local reason=${1:-saved before the time limit, or for another job}
  status=0
  if [ "$restarts" = 0 ]; then
    echo "$reason: the job ends, RESTARTS=0; the same command resumes the run"
    return
  fi
  echo "$reason: resumes in a new attempt"
  retry scontrol requeue "$SLURM_JOB_ID" || fail "the job could not be requeued: submit it again, and the run resumes"
}
