#!/bin/bash
# one-process.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Check:
# - the script starts 1 process on a node with 2 GPUs, and so does the job. For one on each GPU, write
#   --gpus-per-node 2 and remove the GPUs from slurm.sbatch
# - the job uses the Python of this hpc-rl; slurm.python names another one that has hpc-rl

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > one-process.site.yaml <<'END' &&
slurm:
  sbatch:
    gres: gpu:2,lscratch:100
  env:
    TOKENIZERS_PARALLELISM: 'false'
END
hpc-rl submit torchrun --site one-process.site.yaml --nodes 1 --gpus-per-node 1 \
    -- -m my.generate --tensor-parallel 2
