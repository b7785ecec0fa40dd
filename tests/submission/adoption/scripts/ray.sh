#!/bin/bash
# ray.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit ray`.
#
# Not carried over:
# - line 38, `cp -r checkpoints /archive`: below the program; slurm.epilogue runs lines at the end of each attempt
#
# Check:
# - hpc-rl has to be installed in the image (hpc-rl image build)
#
# Superfluous, because hpc-rl does it:
# - lines 12, 15, 16, 17, 18, 20, 23, 24, 27, 37

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > ray.site.yaml <<'END' &&
slurm:
  exclusive: true
  env:
    PYTHONUNBUFFERED: '1'
container:
  binds:
  - /data
  options:
  - --fakeroot
END
hpc-rl submit ray --site ray.site.yaml --job-name grpo --nodes 2 --gpus-per-node 4 --cpus-per-task 64 \
    --mem 200G --time 01:00:00 --image grpo.sif \
    -- python3 -m verl.trainer.main_ppo data.train_files=/data/gsm8k/train.parquet trainer.n_gpus_per_node=4 \
    trainer.nnodes=2 'trainer.logger=["console","wandb"]'
