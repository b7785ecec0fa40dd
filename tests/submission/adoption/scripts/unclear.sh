#!/bin/bash
# unclear.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Not carried over:
# - line 2, --nodes=$NUM_NODES: not a number
# - line 2, --time=soon: not of a form that sbatch reads
# - line 3, --job-name=a/b: a name has letters, digits, '.', '_' and '-'
# - line 7, `python server.py --port 8000`: it runs beside the program
# - line 9, `uv run`: set slurm.python to the Python of its environment (.venv/bin/python)
# - line 9, torchrun ${LAUNCH_OPTIONS}: these options are not known
#
# Check:
# - line 9, `for lr in 1e-5 3e-5; do ...`: the program is one command here, without what is around it
# - the script requests no GPUs: --gpus-per-node is the number of processes on a node
# - size is 7b here: line 6 may change it
# - arguments of the script are arguments of these lines, too: bash FILE ARGUMENTS
# - lr comes from `for lr in 1e-5 3e-5; do` in the script: set it in your shell, or replace it below
# - SLURM_JOB_ID is known in the job only: set it in your shell, or replace it below
# - VALUE2 comes from `${SPLIT##*/}` in the script: set it in your shell, or replace it below

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > unclear.site.yaml <<'END' &&
slurm:
  exclusive: true
  leave_out:
  - gpus-per-node
  setup:
  - stamp=$(date +%s)
  - export RUN=run-$stamp
END
hpc-rl submit torchrun --site unclear.site.yaml --job-name a_b --nodes 1 --gpus-per-node 4 \
    -- src/train.py "$1" --lr "${lr:?}" --size 7b --out out/"${SLURM_JOB_ID:?}" --split "${VALUE2:?}" --data "$HOME"/data/*.jsonl
