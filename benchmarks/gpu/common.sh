# Shared by correct.sh, speed.sh and long.sh, which source it.
#
#     bash benchmarks/gpu/correct.sh OUT
#
# OUT is the folder for logs, results and times.txt. Variables that change a run:
#   BUDGET=575      seconds for the whole script; what is left of them shortens the last legs
#   ONLY=leg,leg    run these legs alone
#   WHEELS=FOLDER   install the wheels in this folder first, below OUT, where packages cannot be fetched
#   PYTHON=python3  the interpreter
test $# = 1 || { echo "usage: bash $0 OUT"; exit 2; }
mkdir -p "$1" && OUT=$(cd "$1" && pwd)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3} BUDGET=${BUDGET:-575}
export PYTHONPATH="$ROOT/src:$ROOT/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
if test -n "${WHEELS:-}"; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$OUT/packages" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH="$PYTHONPATH:$OUT/packages"
fi

# leg NAME SECONDS COMMAND...: run it for at most SECONDS, and no longer than the budget allows. Output goes to
# OUT/NAME.log, its exit code to times.txt; 124 means that time ran out.
leg() {
    local name=$1 limit=$2 begin=$SECONDS code=0
    shift 2
    case ",${ONLY:-$name}," in *",$name,"*) ;; *) return 0 ;; esac
    test $((BUDGET - SECONDS)) -gt "$limit" || limit=$((BUDGET - SECONDS))
    if test "$limit" -lt 8; then
        echo "-- $name: no time left" | tee -a "$OUT/times.txt"
        return 0
    fi
    timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1 || code=$?
    echo "-- $name: exit code $code after $((SECONDS - begin)) of $limit s" | tee -a "$OUT/times.txt"
    grep -aE '^(holds|FAILS|fails|hint|unproven|ranks:|--- rank|\{)|Error' "$OUT/$name.log" | cut -c1-420 | head -40
}

# Let several processes compute on the GPU at the same time, by an MPS daemon of our own that ends with the script.
# Without it, or with MPS=0, they take turns.
share_gpu() {
    test "${MPS:-1}" = 1 || return 0
    daemon=$(mktemp -d)
    if CUDA_MPS_PIPE_DIRECTORY=$daemon CUDA_MPS_LOG_DIRECTORY=$daemon nvidia-cuda-mps-control -d >"$OUT/mps.log" 2>&1
    then
        mps=$daemon
        trap 'echo quit | CUDA_MPS_PIPE_DIRECTORY=$daemon nvidia-cuda-mps-control; rm -rf "$daemon"' EXIT
    else
        echo "-- no MPS daemon: ranks take turns, see mps.log"
        rm -rf "$daemon"
    fi
}

# ranks NODES LOCAL SECONDS WORDS...: a command for leg, for ranks that share the GPU.
ranks() {
    local own=()
    test -z "${mps:-}" || own=(CUDA_MPS_PIPE_DIRECTORY="$mps" CUDA_DEVICE_MAX_CONNECTIONS=8)
    RANKS=(env "${own[@]}" "$PYTHON" -m gpu.ranks "$1" "$2" "$3" gpu.checks "${@:4}")
}
