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

