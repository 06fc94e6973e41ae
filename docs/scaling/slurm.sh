#!/bin/bash
# Train on several hosts with Slurm: sbatch docs/scaling/slurm.sh, from the root of the checkout.
#SBATCH --job-name=vit
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# One process per GPU decodes images and computes; torchrun starts them, srun starts one torchrun on each host.
# SIGTERM, five minutes before the end, makes train.py write a checkpoint; submit the script again to resume.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Restarted processes must not find the addresses of those that have ended.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Seconds in which the checkpoint must be written, or torchrun ends its processes; 30 by default.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270
# srun does not inherit the number of cores.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc_per_node 8 \
    --rdzv_id "$SLURM_JOB_ID" \
    --rdzv_backend c10d \
    --rdzv_endpoint "$head:29500" \
    --max-restarts 3 \
    train.py --config configs/imagenet_vit_b.yaml --data.root /shared/imagenet --out /shared/runs/imagenet_vit_b
