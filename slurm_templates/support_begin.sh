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

