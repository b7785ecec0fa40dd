#!/bin/bash
# deepspeed.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Not carried over:
# - line 13, `srun python cache.py`: another program; submit it too, with --after RUN if one needs the other
# - line 16, `python evaluate.py`: another program; submit it too, with --after RUN if one needs the other
#
# Check:
# - hpc-rl has to be in the program's environment: python -m pip install FOLDER_OF_HPC_RL
#
# Superfluous, because hpc-rl does it:
# - --gpu-bind=closest, lines 5, 6

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > deepspeed.site.yaml <<'END' &&
slurm:
  setup:
  - cat > ds.json <<EOF
  - '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}'
  - EOF
  - python preprocess.py
  python: python
END
hpc-rl submit torchrun --site deepspeed.site.yaml --nodes 2 --gpus-per-node 2 \
    -- deepspeed -m my.train --deepspeed ds.json --lr 1e-5
