#!/usr/bin/env bash
# Trains on the nodes of a Slurm job:
#
#     sbatch --nodes 4 slurm.sh
#
# The environment that is active when you type this must have tawpipe (`pip install .` in a clone), and must be on a disk
# that all nodes see. What `sbatch` is given on the command line beats the lines below.
#SBATCH --job-name=tawpipe
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

# What `tawpipe train` is told. The output folder must be on a disk that all nodes see.
train=(--model meta-llama/Llama-3.1-8B --data '/shared/corpus/*.parquet' --sequence-length 32768 --output /shared/run1) # <- change this line

# Submit the same script again to go on from the newest checkpoint: after a failure, or when the time was up.
train+=(--resume auto)

# All nodes meet at the first one. The port depends on the job, so that two jobs can share a node.
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MEET="$head:$((20000 + SLURM_JOB_ID % 20000))"

# One torchrun on every node, which starts a process for each of its GPUs. Processes that torchrun starts on one machine
# are a node for tawpipe: nothing else needs to be said about which links are fast.
# --cpu-bind=none: else Slurm may bind a node's only task, and so all of its processes, to one core.
# --kill-on-bad-exit: when one node fails, the others end instead of waiting.
# is_host: only the first node listens. Without it every node compares its own name with the address, and names differ.
# SLURM_GPUS_ON_NODE is missing where Slurm does not manage GPUs; then torchrun counts them.
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '
    exec torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-gpu}" \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MEET" \
        --rdzv-conf "is_host=$((SLURM_NODEID == 0))" -m tawpipe train "$@"
' train "${train[@]}"
