#!/usr/bin/env bash
# Trains on machines that ssh reaches without a password:
#
#     ./ssh.sh node1 node2 node3
#
# The folder in which you type this, and the environment that is active, must be at the same place on all of them.
# The first machine must be reachable from the others by the name that you type, at port 29500 (or PORT=...).
# NPROC=4 starts four processes on every machine instead of one for each GPU.
set -euo pipefail

# What `tawpipe train` is told. The output folder must be on a disk that all machines see.
train=(--model meta-llama/Llama-3.1-8B --data '/shared/corpus/*.parquet' --sequence-length 32768 --output /shared/run1) # <- change this line

# Start the same script again to go on from the newest checkpoint.
train+=(--resume auto)

test $# -gt 0 || { echo "usage: $0 HOST..." >&2; exit 2; }
torchrun=$(command -v torchrun) || { echo "$0: no torchrun here; activate the environment that has tawpipe" >&2; exit 2; }
meet="${1#*@}:${PORT:-29500}"
id=$RANDOM$RANDOM
pipes=$(mktemp -d)
hosts=("$@")
lines=()

# Every machine hangs on a line: it gets its orders through it, and ends its processes when the line is cut. It is cut
# when this script ends, however that happens.
end() {
    trap - EXIT INT TERM
    for line in "${lines[@]}"; do exec {line}>&-; done
    wait
}
trap end EXIT
trap 'echo "ending on all machines" >&2; exit 130' INT
trap 'exit 143' TERM

# What one machine is to do. It goes through the line and not into ssh's own words, which others could see in a list of
# processes. Settings of NCCL, gloo, the Hub and tawpipe are taken along.
orders() {
    local host=$1 first=$2 name
    for name in "${!NCCL_@}" "${!GLOO_@}" "${!HF_@}" "${!TAWPIPE_@}"; do printf 'export %s=%q; ' "$name" "${!name}"; done
    printf 'cd %q && { ' "$PWD"
    printf '%q ' "$torchrun" --nnodes ${#hosts[@]} --nproc-per-node "${NPROC:-gpu}" --local-addr "${host#*@}" \
        --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "$meet" --rdzv-conf "is_host=$first" \
        -m tawpipe train "${train[@]}"
    # torchrun ends its processes on SIGTERM; `read` returns when the line is cut.
    printf '< /dev/null & run=$!; { read -r _ <&3; kill $run; } > /dev/null 2>&1 & line=$!; '
    printf 'wait $run; code=$?; kill $line 2> /dev/null; exit $code; } 3<&0; exit\n'
}

for number in "${!hosts[@]}"; do
    mkfifo "$pipes/$number"
    ssh -o BatchMode=yes "${hosts[$number]}" bash -s < "$pipes/$number" &
done
# Only now, so that no ssh holds the line of another machine. An ssh that has failed already is told of below.
trap '' PIPE
for number in "${!hosts[@]}"; do
    exec {line}> "$pipes/$number"
    lines+=("$line")
    orders "${hosts[$number]}" $((number == 0)) >&"$line" 2> /dev/null || true
done
rm -rf "$pipes" # both ends are open

for _ in "${hosts[@]}"; do
    code=0
    wait -n || code=$?
    if test $code -ne 0; then
        echo "a machine has ended with exit code $code; ending the others" >&2
        exit $code
    fi
done
