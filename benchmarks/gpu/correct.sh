#!/usr/bin/env bash
# Checks that need a GPU, and NCCL with several ranks on one. Ten minutes: bash benchmarks/gpu/correct.sh OUT
source "$(dirname "$0")/common.sh"
prove=("$PYTHON" -m tawpipe prove --only)

leg device 60 "$PYTHON" -m gpu.device
leg memory 200 "${prove[@]}" memory end --out "$OUT/memory.json" &  # does not mind what else computes
memory=$!

share_gpu
ranks 2 2 32 sum
leg sum 35 "${RANKS[@]}"
if test -f "$OUT/sum.log" && ! grep -q "^holds sum" "$OUT/sum.log"; then
    mps=""  # ranks do not meet under MPS here; they take turns instead
fi
ranks 2 2 125 --out "$OUT/order.json" prove:sets,order
leg order 130 "${RANKS[@]}"
ranks 2 2 75 exact nf4
leg weights 80 "${RANKS[@]}"
ranks 1 2 75 slices generate
leg stages 80 "${RANKS[@]}"

wait "$memory"
leg longest 100 "${prove[@]}" longest --out "$OUT/longest.json"
leg offload 60 "${prove[@]}" offload --out "$OUT/offload.json"
leg serve 40 "$PYTHON" -m gpu.checks serve
ranks 2 2 145 --out "$OUT/bits.json" --steps 2 \
    --strategies tawpipe-spread,tawpipe-step,tawpipe-striped,hsdp,1f1b,generated prove:waits,bits
leg bits 150 "${RANKS[@]}"
ranks 1 2 85 --out "$OUT/two.json" --strategies zero-bubble,interleaved-1f1b,solved prove:bits,exact
leg two 90 "${RANKS[@]}"
