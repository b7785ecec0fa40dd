#!/bin/bash
# torchrun.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Not carried over:
# - line 36, #SBATCH --exclusive: sbatch ignores it too, because it is below a command
#
# Check:
# - a line of `setup` that fails ends the job: end it with `|| true` if it may fail
# - hpc-rl has to be installed in the environment of the program: python -m pip install hpc-rl
#
# Superfluous, because hpc-rl does it:
# - logs are in the run directory: --output=logs/%x-%j.out, --error=logs/%x-%j.err
# - threads, CPUs and GPUs of the processes: line 16
# - the network interface (slurm.interface names another): line 17
# - addresses, ports and ranks: lines 21-24, 26

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > torchrun.site.yaml <<'END' &&
slurm:
  partition: gpu
  account: my-project
  gpu_option: gres
  gpu_type: a100
  setup:
  - source venv/bin/activate
  - export PYTHONPATH=$PWD/src:${PYTHONPATH:-}
  - mkdir -p results
  modules:
  - cuda/12.4
  - nccl
  python: python
END
hpc-rl submit torchrun --site torchrun.site.yaml --job-name pretrain --nodes 4 --gpus-per-node 8 \
    --cpus-per-task 96 --mem 0 --time 2-00:00:00 \
    -- train.py --config configs/7b.yaml --global-batch 128 --name 'seven billion'
