#!/bin/bash
# deepspeed.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Not carried over:
# - line 13, `srun python cache.py`: a step before the program; a line of set-up runs on the first node only
# - line 16, `python evaluate.py`: another program; submit it too, with --after RUN
#
# Check:
# - a line of `setup` that fails ends the job: end it with `|| true` if it may fail
# - hpc-rl has to be installed in the environment of the program: python -m pip install hpc-rl
#
# Superfluous, because hpc-rl does it:
# - the task of a node has all its GPUs: --gpu-bind=closest
# - addresses, ports and ranks: lines 5-6

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > deepspeed.site.yaml <<'END' &&
slurm:
  setup:
  - |-
    cat > ds.json <<EOF
    {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}
    EOF
  - python preprocess.py
  python: python
END
hpc-rl submit torchrun --site deepspeed.site.yaml --nodes 2 --gpus-per-node 2 \
    -- -m my.train --deepspeed ds.json --lr 1e-5
