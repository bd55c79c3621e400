#!/usr/bin/env bash
# Step times of one GPU beside a plain loop and FSDP2, and where the time goes. Ten minutes for 80 GB:
# bash benchmarks/gpu/speed.sh OUT
source "$(dirname "$0")/common.sh"
steps=("$PYTHON" -m gpu.steps)

all="recompute=none micro=4" # rows of a step, together and with nothing recomputed
leg small 150 "${steps[@]}" \
    "side=ours $all visit=1 liger=1" "side=plain $all liger=1 fused_loss=1" "side=plain $all liger=1" \
    "side=fsdp2 $all liger=1 fused_loss=1" \
    "side=ours recompute=full" "side=plain recompute=full" "side=fsdp2 recompute=full" \
    "side=ours recompute=none" "side=plain recompute=none" \
    "side=ours $all visit=1" "side=plain $all"
row="shape=8b lora=16 tokens=8192 rows=1 steps=3"
leg lora 150 "${steps[@]}" \
    "side=ours $row visit=1" "side=plain $row" "side=ours $row visit=1 recompute=none" \
    "side=ours $row visit=1 recompute=none liger=1" "side=plain $row recompute=none liger=1 fused_loss=1" \
    "side=ours $row visit=1 nf4=1" \
    "side=ours shape=8b lora=16 tokens=4096 rows=4 visit=4 steps=2 recompute=none:16,full"
leg kinds 60 "${steps[@]}" \
    "side=ours recompute=none micro=4 visit=1 steps=1 profile=1" \
    "side=ours shape=8b:4 tokens=8192 rows=2 steps=1 profile=1" \
    "side=ours shape=8b:4 lora=16 tokens=8192 rows=2 steps=1 profile=1"
# Rows of 64 tokens leave the GPU idle: their seconds are the host's.
leg host 60 "${steps[@]}" \
    "side=ours tokens=64" "side=ours tokens=64 recompute=none" "side=ours tokens=64 recompute=selective" \
    "side=plain tokens=64" "side=plain tokens=64 recompute=none" \
    "side=ours shape=tiny tokens=512 rows=8" "side=ours shape=tiny tokens=512 rows=8 micro=8 recompute=none"
leg attention 45 "$PYTHON" -m gpu.attention
leg coding 35 "$PYTHON" -m gpu.coding
leg homes 60 "${steps[@]}" \
    "side=ours rows=8 recompute=none micro=4" "side=ours rows=8 recompute=none micro=4 homes=state"
layers="shape=8b:4 tokens=8192 rows=2 recompute=none steps=3"
leg compiled 110 "${steps[@]}" "side=ours $layers" "side=ours $layers compile=1" "side=plain $layers compile=1"
