#!/bin/bash
# accelerate.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Not carried over:
# - line 16, HF_TOKEN: a secret; export it in your shell, which jobs inherit
#
# Check:
# - hpc-rl has to be in the program's environment: python -m pip install FOLDER_OF_HPC_RL
# - MODEL is Qwen/Qwen2.5-7B here: its default in the script
# - VALUE1 comes from `$(basename "$MODEL")` in the script: set it in your shell, or replace it below
# - SLURM_JOB_ID is known in the job only: set it in your shell, or replace it below
#
# Superfluous, because hpc-rl does it:
# - --signal=B:USR1@600, --requeue, lines 19, 22, 28

cd /work/trl &&
# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > accelerate.site.yaml <<'END' &&
slurm:
  qos: normal
  constraint: nvme
  cpus_per_gpu: 8
  gpu_type: h100
  mem_option: mem-per-gpu
  warning_s: 600
  sbatch:
    mail-type: END,FAIL
    mail-user: me@example.org
  setup:
  - source /opt/conda/etc/profile.d/conda.sh
  - conda activate trl
  env:
    WANDB_PROJECT: my project
  python: python
cache:
  hf_home: /scratch/hf
END
hpc-rl submit torchrun --site accelerate.site.yaml --job-name sft --nodes 2 --gpus-per-node 4 --mem 245760M \
    --time 12:00:00 --sbatch 'exclude=node[7-9]' \
    -- accelerate launch --config_file zero3.yaml sft.py --model_name_or_path Qwen/Qwen2.5-7B --output_dir out/"${VALUE1:?}" \
    --run_name run-"${SLURM_JOB_ID:?}"
