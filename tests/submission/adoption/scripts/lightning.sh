#!/bin/bash
# lightning.sbatch, adopted by hpc-rl. To see the job script first, add --dry-run after `submit torchrun`.
#
# Not carried over:
# - line 8, --array=0-3: no option of hpc-rl's jobs; submit one run for each value
#
# Check:
# - the program has to read torchrun's RANK, LOCAL_RANK and WORLD_SIZE, not SLURM_PROCID
# - hpc-rl has to be in the program's environment: python3 -m pip install FOLDER_OF_HPC_RL
# - SLURM_ARRAY_TASK_ID is known in the job only: set it in your shell, or replace it below
# - arguments of the script are arguments of these lines, too: bash FILE ARGUMENTS

cd lightning &&
# Lines for a site profile. To use them in all jobs, move them to ~/.config/hpc-rl/site.yaml.
cat > lightning.site.yaml <<'END' &&
slurm:
  gpu_option: gpus-per-task
  mem_option: mem-per-cpu
  login_shell: true
  sbatch:
    hint: nomultithread
  setup:
  - module purge
  - module use /apps/modules
  - module load pytorch/2.6
  - case "${CLUSTER:-big}" in
  - '    big) export NCCL_IB_HCA=mlx5 ;;'
  - esac
  env:
    WANDB_MODE: offline
  python: python3
END
hpc-rl submit torchrun --site lightning.site.yaml --nodes 2 --gpus-per-node 4 --cpus-per-task 48 --mem 196608M \
    --sbatch dependency=afterok:4711 \
    -- train.py fit --trainer.devices=4 --seed "${SLURM_ARRAY_TASK_ID:?}" "$@"
