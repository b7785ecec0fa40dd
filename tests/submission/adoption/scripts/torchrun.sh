#!/bin/bash
# torchrun.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Not carried over:
# - line 36, #SBATCH --exclusive: sbatch ignores it too, because it is below a command
#
# Check:
# - line 17, `export NCCL_SOCKET_IFNAME=ib0`: hpc-rl finds the network interface; to keep yours, add slurm.interface=ib0
# - hpc-rl has to be in the program's environment: python -m pip install FOLDER_OF_HPC_RL
#
# Superfluous, because hpc-rl does it:
# - --output=logs/%x-%j.out, --error=logs/%x-%j.err, lines 16, 17, 21, 22, 23, 24, 26

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
