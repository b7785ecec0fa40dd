#!/bin/bash
# pyxis.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit ray`.
#
# Not carried over:
# - line 10, `cd /code`: inside the image, which runs nothing but the program
# - line 10, ray job submit --runtime-env-json {"pip": ["x"]}
#
# Check:
# - hpc-rl has to be installed in the image (hpc-rl image build)
#
# Superfluous, because hpc-rl does it:
# - --gpus=16, lines 7

# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > pyxis.site.yaml <<'END' &&
slurm:
  partition: batch
  login_shell: true
container:
  runtime: pyxis
  binds:
  - ${HOME}/code:/code
  - /data:/data:ro
END
hpc-rl submit ray --site pyxis.site.yaml --job-name ppo --nodes 2 --gpus-per-node 8 --time 120 \
    --image 'registry.example.org#group/rlhf:1' \
    -- python3 train_ppo.py --actor.num_nodes 2 --data /data/*.jsonl
