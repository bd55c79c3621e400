#!/usr/bin/env bash
# A stranger's first hour, as typed and as seen: install, train, make mistakes, go on after a kill, export again,
# fine-tune, ask, plan for clusters, open the pages. Everything happens in a new folder and a new environment, and each
# outcome is checked: the exit code, and words that must be said. Of the repository its wheel (make wheel), its examples
# and the versions that the tests ran with are used, and a clone of it, for make train, demo and test.
#
#     benchmarks/first_hour.sh NEW_FOLDER [TRANSCRIPT]
#
# Where every step was found: README.md, docs/start.md, docs/fine-tuning.md, docs/planning.md, docs/watching.md.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?a new folder}
prefix=$(python3 -c 'import sys; print(sys.base_prefix)')  # of this machine, which nobody else needs to know
transcript=$(realpath -m "${2:-$folder/transcript.txt}")
wheel=$(ls "$repository"/dist/*.whl)
mkdir "$folder" && cd "$folder"
: > "$transcript"
begun=$SECONDS

say() { printf '%s\n' "$*" | tee -a "$transcript"; }
tell() { say ""; say "# $*  (minute $(((SECONDS - begun) / 60)))"; }
fail() { say "FAILED: $*"; exit 1; }
# type_in CODE COMMAND [WORDS...]: type a command, run it, keep what it shows. Another exit code, or words (extended
# regular expressions) that were not said, end the hour.
type_in() {
    local expected=$1 command=$2 code=0 words
    shift 2
    say "\$ $command"
    bash -c "$command" 2>&1 | sed -u "s#$prefix#/usr#g" | tee last.txt | tee -a "$transcript" || code=${PIPESTATUS[0]}
    if test "$code" != 0; then say "(exit code $code)"; fi
    test "$code" = "$expected" || fail "the exit code was to be $expected"
    for words in "$@"; do grep -Eq -- "$words" last.txt || fail "not said: $words"; done
}

tell "Install"
export PIP_CONSTRAINT=$repository/requirements-ci.txt PIP_DISABLE_PIP_VERSION_CHECK=1
type_in 0 "python3 -m venv env"
say "\$ env/bin/python -m pip install --quiet 'tawpipe[peft,plan]'"
env/bin/python -m pip install --quiet --quiet "$wheel[peft,plan]" 2>&1 | tee -a "$transcript"
export PATH=$PWD/env/bin:$PATH
cp -r "$repository/examples" examples
type_in 0 "tawpipe --version"
type_in 0 "tawpipe --help" "chat" "export"
type_in 0 "tawpipe train --help"
type_in 0 "tawpipe doctor" "--nproc 2"
test "$(ls)" = "$(printf 'env\nexamples\nlast.txt\n%s' "$(ls | grep transcript || true)" | sed '/^$/d')" || fail "doctor left a file"

tell "What would a run do here?"
type_in 0 "tawpipe train --dry-run" "all checks passed" "available memory" "disk +"

tell "Mistakes"
type_in 2 "tawpipe train --lr 1e-4" "--learning-rate"
type_in 2 "tawpipe train --data corpus.txt" "no such file"
type_in 2 "tawpipe train --model no-such-model" "--model: got 'no-such-model'"
type_in 2 "tawpipe train --schedule.strategy tawpipe" "one of tawpipe-spread"
printf 'steps: 3\n\tlora: 2\n' > bad.yaml
type_in 2 "tawpipe train --config bad.yaml" "line 2 has a tab; use spaces"
type_in 2 "tawpipe train --log.trackers wandb" "pip install 'tawpipe\[wandb\]'"

tell "A first run, killed on the way, and gone on with"
say "\$ tawpipe train --steps 24 --checkpoint.every 6 --output runs/first"
tawpipe train --steps 24 --checkpoint.every 6 --output runs/first > first.log 2>&1 &
run=$!
until grep -q "^step" first.log; do sleep 0.2; kill -0 $run; done
type_in 2 "tawpipe train --steps 3 --output runs/first" "a folder without a run|no other run"
until test -e runs/first/checkpoints/step-00000012; do sleep 0.2; kill -0 $run; done
worker=$(pgrep --parent $run | head -1)
kill -KILL "$worker"
wait $run && fail "a run without one of its processes was to fail"
say "(process $worker was killed by hand after step 12)"
sed "s#$prefix#/usr#g" first.log | tee -a "$transcript"
grep -q "To resume from there: tawpipe train" first.log || fail "it was to say how to go on"
type_in 0 "tawpipe checkpoint list runs/first" "step 12"
type_in 0 "tawpipe export runs/first" "the model of runs/first/checkpoints/step-000000"
type_in 0 "tawpipe train --config runs/first/config.yaml --resume auto" "resumed from" "step 24/24" "runs/first/model"
type_in 0 "tawpipe export runs/first --output again"
type_in 0 "cmp again/model.safetensors runs/first/model/model.safetensors"

tell "A chat model: fine-tune it, ask it"
type_in 0 "python examples/small_model.py"
type_in 0 "head -2 examples/chats.jsonl"
type_in 0 "tawpipe train --model small-model --data examples/chats.jsonl --sequence-length 64 --lora.rank 16 --export.merge \
--learning-rate 0.01 --epochs 30 --output tuned" "adapter: LoRA of rank 16" "sample +'.*capital"
type_in 0 "tawpipe chat tuned --prompt 'What is the capital of Norila?' --tokens 16 --temperature 0" "Limaro"
type_in 0 "tawpipe train --config examples/recipes/qwen3-8b.yaml --config examples/recipes/qlora.yaml --model small-model \
--data examples/chats.jsonl --dry-run" "all checks passed"

tell "In a clone: the first commands of the README, its tests, the commands of all pages"
say "\$ git clone tawpipe; cd tawpipe"
git clone --quiet "$repository" clone
cd clone
type_in 0 "make train" "step 60/60"
type_in 0 "make demo" "The answer has changed, and Paris is still the capital of France"
type_in 0 "make test" "[0-9]+ passed"
type_in 0 "make test-all ARGS='tests/test_pages_commands.py tests/test_coming_from.py tests/test_fine_tuning.py'" "passed"
rm last.txt
test -z "$(git status --porcelain)" || fail "a file was left that git does not ignore"
cd ..

tell "Would a cluster do it?"
type_in 0 "tawpipe plan --model llama-8b --topology 3x8@25gbit --device-name H100 --memory 80 --sequence-length 32768 --global-batch 96 --report plan.html --save plan.yaml" "chosen"
type_in 0 "tawpipe plan --model llama-8b --topology 2x1@10gbit --device-name 'RTX 4090' --memory 24 --sequence-length 4096 --global-batch 8 --lora.rank 16 --quantize nf4" "chosen"

tell "Look at it"
type_in 0 "tawpipe open runs/first --out pages"
type_in 0 "ls pages" "run.html" "plotly.min.js"
grep -q "<title>Run: tiny: first</title>" pages/run.html || fail "a page was to name model and run"
test -z "$(find pages plan.html -name '*.html' -size +1024k)" || fail "a page has more than a megabyte"
tell "Done"
