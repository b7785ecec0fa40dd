#!/bin/bash
# one-process.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Check:
# - the script starts 1 process, and the job 2, one for each GPU
# - the job uses the Python of this hpc-rl; slurm.python names another one that has hpc-rl

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > one-process.site.yaml <<'END' &&
slurm:
  gpu_option: gres
  sbatch:
    gres: lscratch:100
  env:
    TOKENIZERS_PARALLELISM: 'false'
END
hpc-rl submit torchrun --site one-process.site.yaml --nodes 1 --gpus-per-node 2 \
    -- -m my.generate --tensor-parallel 2
