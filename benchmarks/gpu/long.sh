#!/usr/bin/env bash
# Long rows on a GPU of 80 GB: an adapter on 8 B at 32k and 128k tokens, and the longest row of four layers that are all
# trained, in 72 GiB. Nine minutes: bash benchmarks/gpu/long.sh OUT
# A row that does not fit is a line with an out-of-memory error.
source "$(dirname "$0")/common.sh"
steps=("$PYTHON" -m gpu.steps)
once="rows=1 visit=1 steps=1 warm=0 short=1"

row="shape=8b lora=16 tokens=32768 $once"
leg at_32k 110 "${steps[@]}" "side=ours $row" "side=plain $row" "side=ours $row recompute=none:5,full"
row="shape=8b:8 lora=16 tokens=131072 $once"
leg at_128k 190 "${steps[@]}" \
    "side=ours $row offload=8 liger=1" "side=plain $row liger=1 fused_loss=1" \
    "side=ours $row offload=8" "side=plain $row" "side=ours $row chunk=8192 offload=8 recompute=selective" \
    "side=ours $row recompute=selective"
row="shape=8b:4 most=72 $once"
leg longest_plain 90 "${steps[@]}" \
    "side=plain $row tokens=98304" "side=plain $row tokens=131072" "side=plain $row tokens=163840" \
    "side=plain $row tokens=196608"
leg longest_ours 170 "${steps[@]}" \
    "side=ours $row tokens=163840" "side=ours $row tokens=196608" \
    "side=ours $row tokens=262144 chunk=8192 offload=4" "side=ours $row tokens=393216 chunk=8192 offload=4"
