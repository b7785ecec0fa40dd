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
  if [ ! -f "$file" ] || [ -L "$file" ]; then fail "finds no file $file with the settings of the job, or a link: submit the run again"; fi
  [ -z "$(find "$file" -perm /022)" ] || fail "finds that others can write to $file: look at it, and take their right away (chmod go-w)"
  cp "$file" "$HPC_RL_ATTEMPT_DIR/.config.partial"
  mv "$HPC_RL_ATTEMPT_DIR/.config.partial" "$HPC_RL_ATTEMPT_DIR/config.yaml"
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
report_end() {
  case $terminated$code in
    0) report COMPLETED 0 ;;
    75) report STOPPED 75 ;;
    [0-9]*) report FAILED "$code" ;;
    *) report "$terminated" "$code" ;;
  esac
}
finish() {
  local code=$?
  ! is_latest || rm -f "$HPC_RL_RUN_DIR/stop"
  rm -f "$HPC_RL_ATTEMPT_DIR/.ray-token"
  report_end
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

