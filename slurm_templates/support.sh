# shellcheck shell=bash disable=SC2016,SC2154,SC2317 # the script sets variables, and its lines call `module`; traps call functions
# The functions of job.sbatch. `hpc-rl` writes this file beside each job script, which reads it only if it is unchanged.
#
# begin_job, begin_setup ... end_of_setup, begin_attempt, begin_step, the step, end_job: in this order. The script sets `python`,
# and with the prefix hpc_rl_
#   warned_within_s                    seconds before the end of the walltime in which a warning of Slurm is about the walltime
#   start_timeout, start_timeout_key   seconds within which the first task has to start (empty: no limit), and the option's name
#   requeue, max_node_failures         whether the job may be queued again, and how often after it has lost a node

begin_job() {
  warned='' said_why=''
  # Slurm's programs take their cluster, and what they print, from variables of the shell that submitted this script.
  unset SLURM_CLUSTERS SLURM_TIME_FORMAT "${!SQUEUE_@}" "${!SCONTROL_@}"
  # A core dump would contain the variables of the job, and so its tokens. A command in slurm.setup can allow it again.
  ulimit -S -c 0
  trap warn USR2
  HPC_RL_JOB_END=$(job_end)
  export HPC_RL_JOB_END
  trap unprepared EXIT
  set -euo pipefail
  [ -w "$HPC_RL_RUN_DIR" ] || fail "cannot write the run directory $HPC_RL_RUN_DIR: put it where all nodes can write"
  if [ ! -O "$HPC_RL_RUN_DIR" ] || [ -n "$(find -H "$HPC_RL_RUN_DIR" -maxdepth 0 -perm /022)" ]; then
    fail "finds that another user owns $HPC_RL_RUN_DIR or can write to it: submit again with another --run-dir"
  fi
  # This script would write to a file, or through a link, that somebody else has planted.
  planted=$(find -H "$HPC_RL_RUN_DIR" -ignore_readdir_race -mindepth 1 -maxdepth 1 ! -uid 0 ! -uid "$(id -u)" -print -quit) ||
    fail "cannot read the owners of all files in $HPC_RL_RUN_DIR: submit again with another --run-dir"
  [ -z "$planted" ] || fail "finds $planted, which belongs to another user: submit again with another --run-dir"
}

fail() { echo "hpc-rl: node $(hostname) $*" >&2; said_why=1; exit 2; }
# Whatever ends this script before the job step is a failure, even `exit 0` in a line of yours.
unprepared() {
  local code=$?
  [ -z "${setup_notes:-}" ] || rm -rf "$setup_notes"
  [ -z "$said_why" ] || exit 2
  [ "$code" -ne 0 ] || [[ $BASH_COMMAND == exit* ]] || return 0 # ended by a signal
  fail "ended with exit code $code before the job step, at: ${setup_line:-$BASH_COMMAND}"
}

# Replace a file of the run directory: readers see the old one or the new one, and no link is followed.
replace() {
  local new=$HPC_RL_RUN_DIR/.$1.$SLURM_JOB_ID.partial
  rm -f "$new"
  (set -o noclobber && cat > "$new") && mv --force --no-target-directory "$new" "$HPC_RL_RUN_DIR/$1"
}

# Slurm sends USR2 to this shell only, slurm.warning_s before the walltime ends. Some clusters send it before a preemption, too.
# The stop file asks the trainers to save and exit. A second USR2 ends the job step.
resumes_later() {
  grep --quiet --line-regexp --extended-regexp 'walltime|requeue|preemption' "$HPC_RL_RUN_DIR/stop" 2> /dev/null
}
latest_end() { # starts no program: see `warn`
  { read -r HPC_RL_JOB_END < "${HPC_RL_ATTEMPT_DIR:-}/.job-end"; } 2> /dev/null || true
}
warn() { # starts no program: if srun ended meanwhile, bash would lose its exit code
  [ -z "$warned" ] || kill -TERM "${step:-}" 2> /dev/null || true
  warned=1
  local now reason=walltime
  printf -v now '%(%s)T' -1
  latest_end
  [ "$((${HPC_RL_JOB_END:-0} - now))" -le "$hpc_rl_warned_within_s" ] || reason=preemption
  set -o noclobber
  { echo "$reason" > "$HPC_RL_RUN_DIR/stop"; } 2> /dev/null || true
  set +o noclobber
}

# The end of the walltime in Unix time, by the clock of this node: the controller's clock may differ. Trainers compare it
# with the time that their steps and checkpoints take.
job_end() {
  local -x SLURM_TIME_FORMAT=%s
  local id=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  local end=${SLURM_JOB_END_TIME:-} now # Slurm 23.02 and newer set the variable
  [ -n "$end" ] || end=$(timeout 20 squeue --noheader --jobs="${id:-$SLURM_JOB_ID}" --format=%e 2> /dev/null) || true
  now=$(timeout 20 scontrol show config 2> /dev/null | sed -n 's/^Configuration data as of //p') || true
  if [[ $end =~ ^[0-9]+$ && $now =~ ^[0-9]+$ ]]; then end=$((end - now + $(date +%s))); fi
  if [[ $end =~ ^[0-9]+$ ]]; then echo "$end"; fi
}

# The set-up: `begin_setup` begins, `watched LINE` names the line that follows it and checks the one before, `end_of_setup` ends.
# A failure ends the job with exit code 2 and the line. A condition that is false, as in `[ -d X ] && module use X`, is none.
setup_line='' setup_lines='' setup_asked='' setup_notes=''

setup_failed() { # EXIT CODE, COMMAND
  local at=
  [[ $setup_line == *"$2"* ]] || at=" at: $2"
  fail "could not be set up: $setup_line: failed with exit code $1$at. Correct the line, or end it with \`|| true\` if it may fail"
}

# Bash calls this for each command whose failure nothing handles. Code 141 is that of a program whose output a pipe no longer
# reads. Sourced files, and functions that are not defined in these lines, count by their own exit codes alone.
setup_error() { # EXIT CODE, COMMAND
  local inside=${FUNCNAME[1]:-main} command=$2
  [ "$1" -ne 141 ] || return 0
  [ "$inside" = main ] || [[ $setup_lines =~ (^|[[:space:]\;])"$inside"[[:space:]]*[\(\{] ]] || return 0
  [ "$inside" != main ] || [ "$BASH_SUBSHELL" -gt 0 ] || command=$setup_asked # $2 may be in a function that it called
  [ "$BASH_SUBSHELL" -gt 0 ] || setup_failed "$1" "$command"
  echo "$1 $command" >> "$setup_notes/failed" # the exit code of $(...) and <(...) is often lost
  exit "$1"
}

# Bash calls this before each command, and before the `return` of a function that was called.
setup_before() { # COMMAND
  [ -n "$setup_notes" ] || return 0
  [[ $1 == watched\ * || $1 == end_of_setup || $1 == return* ]] || setup_asked=$1
  if declare -F module > /dev/null && [[ $(declare -f module) != *unwatched_module* ]]; then watch_module; fi
}

watched() { # LINE
  local code=$? question='^(\[|test|type|grep|command -[vV]|\(\()' failed
  if [ "$code" -ne 0 ] && [ "$code" -ne 141 ] && ! [[ $setup_asked =~ $question ]]; then setup_failed "$code" "$setup_asked"; fi
  if { read -r code failed < "$setup_notes/failed"; } 2> /dev/null; then setup_failed "$code" "$failed"; fi
  setup_line=$1 setup_lines+=$'\n'$1 setup_asked=
}

begin_setup() {
  set +eu
  watch_setup
  set -E
  trap 'setup_error "$?" "$BASH_COMMAND"' ERR
  trap 'setup_before "$BASH_COMMAND"' DEBUG
}

watch_setup() {
  setup_prefix=${VIRTUAL_ENV:-}:${CONDA_PREFIX:-}
  setup_notes=$(mktemp --directory "/tmp/$(id -u).$SLURM_JOB_ID.setup.XXXXXX") || fail "cannot make a folder in /tmp"
}

end_of_setup() {
  watched ''
  rm -rf "$setup_notes"
  setup_notes=
  if declare -F unwatched_module > /dev/null; then
    eval "$(declare -f unwatched_module | sed '1s/^unwatched_//')"
    unset -f unwatched_module
  fi
  eval "${hpc_rl_support:-}" # the set-up may have defined functions with these names
  local prefix
  [ "${VIRTUAL_ENV:-}:${CONDA_PREFIX:-}" != "$setup_prefix" ] || return 0
  for prefix in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    if [[ -n $prefix && $python == /* && $python != "$prefix"/* ]]; then
      echo "hpc-rl: the set-up activates $prefix, but the job runs with $python: set slurm.python to choose" >&2
    fi
  done
}

# Environment Modules 3 prints an error and returns 0. A module has been loaded if the list of loaded modules has it.
watch_module() {
  eval "unwatched_$(declare -f module)"
  export -f unwatched_module # `module` may be exported
  module() {
    if [ -z "${setup_notes:-}" ]; then # a program that the set-up starts
      unwatched_module "$@"
      return
    fi
    local code=0 action='' name problem='error|unable|can.?.?t|could not|not found|unknown|no such|fail|invalid|exist'
    unwatched_module "$@" 2> "$setup_notes/module" || code=$?
    cat "$setup_notes/module" >&2
    if [ "$code" -ne 0 ]; then return "$code"; fi
    if ! grep --quiet --extended-regexp --ignore-case "$problem" "$setup_notes/module"; then return 0; fi
    for name; do
      case $action:$name in
        :load | :add) action=LOADEDMODULES ;;
        :swap | :switch) action=swap ;;
        swap:[!-]*) action=LOADEDMODULES ;; # this one is unloaded
        :use) action=MODULEPATH ;;
        :* | *:-*) ;;
        *) [[ :${!action:-}: == *:"${name%/}"[:/]* ]] || return 1 ;;
      esac
    done
  }
}

# Begin an attempt: each start of the job has its own folder of logs. Training resumes from the last checkpoint.
begin_attempt() {
  probe=$HPC_RL_RUN_DIR/.probe-$SLURM_JOB_ID
  if ! head --bytes=1M /dev/zero > "$probe"; then
    rm -f "$probe"
    free=$(df --human-readable --output=target,avail,iavail "$HPC_RL_RUN_DIR" | tail -n 1)
    fail "cannot write 1 MB into the run directory $HPC_RL_RUN_DIR: free space or raise your quota (free space and inodes: $free)"
  fi
  rm "$probe"
  # The job id as squeue shows it: 12, or 12_3 for a task of an array. Of an array's last
  # task, SLURM_JOB_ID names the whole array.
  job=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

  # Only one job at a time may use a run directory. The kernel releases the lock whenever the job ends. `hpc-rl status` takes
  # it for a moment, to see who has it.
  exec 9>> "$HPC_RL_RUN_DIR/.lock"
  chmod 600 "$HPC_RL_RUN_DIR/.lock"
  locked=0
  flock --wait 2 --conflict-exit-code 9 9 || locked=$?
  owner=$(tail -n 1 "$HPC_RL_RUN_DIR/.lock")
  if [ "$locked" -eq 9 ] && [ "$owner" != "$job" ]; then fail "finds job $owner running in $HPC_RL_RUN_DIR"; fi
  echo "$job" >&9

  # What earlier attempts left.
  if [ -z "$warned" ] && resumes_later; then rm "$HPC_RL_RUN_DIR/stop"; fi
  rm -f "$HPC_RL_RUN_DIR"/attempt-*/.ray-token

  attempt=1
  for folder in "$HPC_RL_RUN_DIR"/attempt-*; do
    number=${folder##*-}
    if [[ $number =~ ^[1-9][0-9]*$ ]] && [ "$number" -ge "$attempt" ]; then attempt=$((number + 1)); fi
  done
  export HPC_RL_ATTEMPT_DIR="$HPC_RL_RUN_DIR/attempt-$attempt"
  mkdir --mode=700 "$HPC_RL_ATTEMPT_DIR"
}

begin_step() {
  trap finish EXIT
  trap terminate TERM
  report RUNNING null
  # Since Slurm 22.05 srun does not inherit --cpus-per-task.
  [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
}

# Copy config.yaml to the attempt, whose processes read the copy: an edit during an attempt counts from the next one on.
take_config() {
  local file=$HPC_RL_RUN_DIR/config.yaml
  if [ ! -f "$file" ] || [ -L "$file" ]; then fail "finds no file $file with the settings of the job: submit the run again"; fi
  cp "$file" "$HPC_RL_ATTEMPT_DIR/config.yaml"
}

# If this node was cut off, the next attempt may have begun on other nodes. Its stop file and state are not this script's.
is_latest() { [ ! -e "$HPC_RL_RUN_DIR/attempt-$((attempt + 1))" ]; }
# Record the state of the job, for clusters without accounting. A full disk must not stop what follows.
report() {
  is_latest || return 0
  printf '{"job_id": "%s", "attempt": %d, "state": "%s", "exit_code": %s}\n' \
    "$job" "$attempt" "$1" "$2" | replace status.json || true
}
run_epilogue() { # the user's own commands at the end, in which failures and unset variables are ignored
  declare -F slurm_epilogue > /dev/null || return 0
  set +eu
  slurm_epilogue
  set -eu
}
finish() {
  local code=$?
  ! is_latest || rm -f "$HPC_RL_RUN_DIR/stop"
  rm -f "$HPC_RL_ATTEMPT_DIR/.ray-token"
  case $terminated$code in
    0) report COMPLETED 0 ;;
    75) report STOPPED 75 ;;
    [0-9]*) report FAILED "$code" ;;
    *) report "$terminated" "$code" ;;
  esac
  (run_epilogue) || true
}

# Slurm ends the job: it is cancelled, preempted or queued again, or its walltime is over. The tasks are signalled too, and
# save. What still runs KillWait later (30 s) is killed. `status` reads the file if this script is killed before its end.
terminated=
terminate() { # starts no program: see `warn`
  [ -z "$terminated" ] || kill -TERM "${step:-}" 2> /dev/null || true
  local now
  printf -v now '%(%s)T' -1
  terminated=CANCELLED
  latest_end
  [ -z "$HPC_RL_JOB_END" ] || [ "$now" -lt "$HPC_RL_JOB_END" ] || terminated=TIMEOUT
  { echo "$terminated" > "$HPC_RL_ATTEMPT_DIR/.terminated"; } 2> /dev/null || true
}

# Wait for the job step, and end the script with its exit code.
end_job() {
  # The first node's task writes the exit code on which the tasks agree to `.outcome`, and the names of nodes that have not
  # answered to `.lost`. srun would wait for such a node for minutes, and for a dead slurmstepd forever.
  # If the clock jumps, the job was suspended, and Slurm has moved the end of its walltime.
  outcome=$HPC_RL_ATTEMPT_DIR/.outcome
  lost=$HPC_RL_ATTEMPT_DIR/.lost
  # Before its first task starts, srun waits without a limit, for example for another job step that holds the nodes.
  no_start=$HPC_RL_ATTEMPT_DIR/.no-start
  {
    patience=90
    begin=$SECONDS
    while kill -0 "$step" && [ "$patience" -gt 0 ]; do
      before=$SECONDS
      sleep 1
      if [ $((SECONDS - before)) -gt 10 ]; then
        end=$HPC_RL_ATTEMPT_DIR/.job-end
        if SLURM_JOB_END_TIME='' job_end > "$end.new" && [ -s "$end.new" ]; then mv "$end.new" "$end" || true; fi
      fi
      if [ -n "$hpc_rl_start_timeout" ] && [ ! -e "$no_start" ] && [ $((SECONDS - begin)) -gt "$hpc_rl_start_timeout" ]; then
        begin=9999999999
        if ! compgen -G "$HPC_RL_ATTEMPT_DIR/.*.here"; then touch "$no_start" && kill -TERM "$step"; fi
      fi
      if [ -e "$no_start" ]; then patience=$((patience - 9)); fi
      if [ -e "$lost" ] && [ "$patience" -gt 3 ]; then patience=3; fi # srun prints the last messages meanwhile
      if [ -e "$outcome" ] || [ -e "$lost" ]; then patience=$((patience - 1)); fi
    done
    [ "$patience" -gt 0 ] || kill -KILL "$step"
  } > /dev/null 2>&1 9>&- &
  while kill -0 "$step" 2> /dev/null; do wait "$step" 2> /dev/null || true; done # a signal interrupts `wait`, not the step
  code=0
  wait "$step" || code=$?
  if [ -s "$outcome" ]; then
    code=$(cat "$outcome")
  elif [ -e "$lost" ]; then
    code=1
  elif [ -e "$no_start" ]; then
    code=1
    echo "hpc-rl: srun has started no task within $hpc_rl_start_timeout s ($hpc_rl_start_timeout_key). Another job step may hold the nodes" \
      "(squeue --steps --jobs=$SLURM_JOB_ID): end it; srun's own reason is above" >&2
  elif [ -n "$terminated" ]; then
    : # Slurm ended the tasks
  elif [ "$code" -gt 128 ]; then
    echo "hpc-rl: srun, or a node entry that it started, was ended by signal $((code - 128)) before the nodes of the job had agreed on its end" >&2
  elif [ "$code" -ne 0 ] && [ "$code" -ne 2 ] && [ "$code" -ne 75 ]; then
    echo "hpc-rl: srun ended with exit code $code before the nodes of the job had agreed on its end" >&2
  fi

  # Remove what killed tasks left on the nodes' own disks: folders of this user, and no links.
  if [ "$code" -ne 0 ] && [ "$code" -ne 75 ] && [ ! -e "$lost" ]; then
    timeout 20 srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --quiet \
      bash -c 'find -H /tmp /var/tmp /dev/shm "${TMPDIR:-/tmp}" -mindepth 1 -maxdepth 1 -type d -user "$(id -u)" \
        -name "$(id -u).$SLURM_JOB_ID.*" -exec chmod -R u+rwX {} + -exec rm -rf {} +' 2> /dev/null || true
  fi
  [ -z "$hpc_rl_requeue" ] || queue_again_if_due
  [ -z "$terminated" ] || code=143
  exit "$code"
}

fact() { [[ $facts =~ (^|[[:space:]])$1=([^[:space:]]+) ]] && echo "${BASH_REMATCH[2]//(null)/}"; }
# Slurm may have queued the job again already, for example because it has lost a node too. Then it refuses `scontrol requeue`.
slurm_has_requeued() {
  facts=$(timeout --signal=KILL 20 scontrol show job --oneliner "$job" 2> /dev/null) || true
  restarts=$(fact Restarts) || true
  [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]
}
# The controller may be out of reach for minutes, because it restarts or because this node was cut off. Meanwhile it may have
# started the next attempt on other nodes, and a second requeue would end that attempt. So it is asked before each request.
# A job that ends because it was cancelled stays ended. One that ends because of its walltime or a preemption does not.
cancelled() {
  [ "$(fact JobState)" != CANCELLED ] || return 0
  preempted_at=$(fact PreemptTime) || true
  [ "${preempted_at:-None}" = None ] || return 1
  if [ -z "$terminated" ] && [ "$(fact JobState)" = COMPLETING ]; then terminate; fi # SIGTERM has not arrived yet
  [ "$terminated" = CANCELLED ]
}
queue_again() {
  local said="the controller did not answer, or has forgotten the job"
  for _ in {1..30}; do
    if slurm_has_requeued; then return; fi
    if [ -z "$facts" ]; then
      sleep 10
      continue
    fi
    if cancelled; then
      if slurm_has_requeued; then return; fi # and the script has received its SIGTERM meanwhile
      terminated=CANCELLED
      echo "hpc-rl: job $job was cancelled, and is not queued again"
      return 1
    fi
    [ "$requests" -lt 2 ] || break
    requests=$((requests + 1))
    trap '' TERM # Slurm ends this script too
    said=$(timeout --signal=KILL 20 scontrol requeue "$job" 2>&1) && return
    trap terminate TERM
  done
  echo "hpc-rl: job $job could not be queued again ($said): look at it with squeue, and if it has ended, submit the run again" >&2
  return 1
}
requeue() { # WHY [NODES TO LEAVE OUT]
  trap - EXIT
  echo "hpc-rl: $1; job $job is queued again"
  ! is_latest || rm -f "$HPC_RL_RUN_DIR/stop"
  rm -f "$HPC_RL_ATTEMPT_DIR/.ray-token"
  report REQUEUED "$code"
  (trap '' TERM && run_epilogue) || true
  if ! queue_again; then
    if [ "$terminated" = CANCELLED ]; then
      code=143
      report CANCELLED 143
    elif [ "$code" -eq 75 ]; then
      report STOPPED 75
    else
      report FAILED "$code"
    fi
  elif [ -n "${2:-}" ] && [ "$requests" -eq 0 ]; then
    echo "hpc-rl: Slurm has queued job $job again by itself. This node may have been cut off instead of $2, so no node is excluded"
  elif [ -n "${2:-}" ]; then
    # Slurm accepts this for a waiting job only. The job cannot start before this script has ended.
    local excluded
    excluded=$(fact ExcNodeList) || true
    scontrol update JobId="$job" ExcNodeList="$2${excluded:+,$excluded}" ||
      echo "hpc-rl: Slurm refused to exclude $2: the job may get it again"
  fi
  exit "$code"
}
stopped_by_user() { [ -e "$HPC_RL_RUN_DIR/stop" ] && ! resumes_later; }

# Queue this job again if it has not ended for good: it keeps its id, and the run resumes from its last checkpoint.
queue_again_if_due() {
  facts=
  if [ "$code" -ne 0 ] || [ -n "$terminated" ]; then
    facts=$(timeout 20 scontrol show job --oneliner "$job" 2> /dev/null) || true
  fi
  requests=0
  preempted_at=$(fact PreemptTime) || true
  restarts=$(fact Restarts) || true
  lost_nodes=$(paste --serial --delimiters=, "$lost" 2> /dev/null) || true
  saved=
  if [ "$code" -eq 75 ] && resumes_later; then saved="stopped before the $(cat "$HPC_RL_RUN_DIR/stop")"; fi
  if [ -n "$terminated" ] && [ "${restarts:-0}" -gt "${SLURM_RESTART_COUNT:-0}" ]; then
    echo "hpc-rl: ${saved:-ended by Slurm before it had saved}; Slurm has queued job $job again"
    terminated=REQUEUED
  elif [ -n "$saved" ] && [ "$terminated" != CANCELLED ]; then
    requeue "$saved"
  elif [ "$code" -ne 75 ] && [ "${preempted_at:-None}" != None ] && [ -z "$terminated" ] &&
    { [ "$code" -eq 143 ] || { [ "$code" -ne 0 ] && resumes_later; }; } && ! stopped_by_user; then
    # A job that was suspended has a PreemptTime too.
    requeue "preempted before it had saved"
  elif [ -n "$lost_nodes" ] && [ -z "$terminated" ]; then
    # One line for each time: job, attempt, nodes. Another job of this run begins to count again.
    echo "$job $attempt $lost_nodes" >> "$HPC_RL_RUN_DIR/lost-nodes" || true
    failures=$(grep --count "^$job " "$HPC_RL_RUN_DIR/lost-nodes") || true
    if stopped_by_user; then
      : # the run ends here
    elif [ "${failures:-0}" -le "$hpc_rl_max_node_failures" ]; then
      requeue "lost $lost_nodes (${failures:-0} of at most $hpc_rl_max_node_failures times)" "$lost_nodes"
    elif slurm_has_requeued; then
      echo "hpc-rl: lost $lost_nodes; Slurm has queued job $job again"
      terminated=REQUEUED
    else
      echo "hpc-rl: lost $lost_nodes; job $job is not queued again (slurm.max_node_failures is $hpc_rl_max_node_failures)"
    fi
  elif [ "$code" -ne 0 ] && [ -e "$HPC_RL_ATTEMPT_DIR/.hang" ] && [ "$terminated" != CANCELLED ] && ! stopped_by_user; then
    if [ ! -e "$HPC_RL_RUN_DIR/attempt-$((attempt - 1))/.hang" ]; then
      requeue "the job hung ($(head -n 1 "$HPC_RL_ATTEMPT_DIR/.hang"))"
    fi
    echo "hpc-rl: the attempt before hung too, so job $job is not queued again"
  fi
}
