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
    if [ "$terminated" = CANCELLED ]; then code=143; else terminated=''; fi
    report_end
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

remains_ended() { # MESSAGE, THE RULE
  if slurm_has_requeued; then
    echo "$1; Slurm has queued job $job again"
    terminated=REQUEUED
  else
    echo "$1; job $job is not queued again$2"
  fi
}

# Queue this job again if it has not ended for good: it keeps its id, and the run resumes from its last checkpoint. `requeue`
# ends the script. All rules are here: most of them need Slurm's answers, or hold if the first node's entry was killed.
queue_again_if_due() {
  [ "$code" -ne 0 ] || [ -n "$terminated" ] || return 0
  requests=0 saved=''
  if [ "$code" -eq 75 ] && resumes_later; then saved="stopped before the $(cat "$HPC_RL_RUN_DIR/stop")"; fi
  if slurm_has_requeued && [ -n "$terminated" ]; then
    echo "hpc-rl: ${saved:-ended by Slurm before it had saved}; Slurm has queued job $job again"
    terminated=REQUEUED
    return
  fi
  lost_nodes=$(paste --serial --delimiters=, "$lost" 2> /dev/null) || true
  [ -z "$terminated" ] || lost_nodes=''
  # One line for each time: job, attempt, nodes. Another job of this run begins to count again.
  [ -z "$lost_nodes" ] || echo "$job $attempt $lost_nodes" >> "$HPC_RL_RUN_DIR/lost-nodes" || true
  if [ "$terminated" = CANCELLED ] || stopped_by_user; then return; fi
  [ -z "$saved" ] || requeue "$saved"
  preempted_at=$(fact PreemptTime) || true # a job that was suspended has one too
  if [ "${preempted_at:-None}" != None ] && [ -z "$terminated" ] && { [ "$code" -eq 143 ] || resumes_later; }; then
    requeue "preempted before it had saved"
  elif [ -n "$lost_nodes" ]; then
    failures=$(grep --count "^$job " "$HPC_RL_RUN_DIR/lost-nodes") || failures=${failures:-0}
    [ "$failures" -gt "$hpc_rl_max_node_failures" ] ||
      requeue "lost $lost_nodes ($failures of at most $hpc_rl_max_node_failures times)" "$lost_nodes"
    remains_ended "hpc-rl: lost $lost_nodes" " (slurm.max_node_failures is $hpc_rl_max_node_failures)"
  elif [ -e "$HPC_RL_ATTEMPT_DIR/.hang" ]; then
    [ -e "$HPC_RL_RUN_DIR/attempt-$((attempt - 1))/.hang" ] ||
      requeue "the job hung ($(head -n 1 "$HPC_RL_ATTEMPT_DIR/.hang"))"
    remains_ended "hpc-rl: the previous attempt also hung" ''
  fi
}
