#!/usr/bin/env bash
# A stranger's first hour, as typed and as seen: install, train, make mistakes, resume after a kill, fine-tune, plan for a
# cluster, open the pages. Everything happens in a new folder and a new environment, and nothing is read from the
# repository but its wheel (make wheel) and the versions that the tests ran with.
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
# Type a command: show it, run it, keep what it shows. Another end than "expected" ends the hour.
type_in() {
    local expected=$1 code=0
    shift
    say "\$ $*"
    bash -c "$*" 2>&1 | sed -u "s#$prefix#/usr#g" | tee -a "$transcript" || code=${PIPESTATUS[0]}
    if test "$code" != 0; then say "(exit code $code)"; fi
    test "$code" = "$expected" || { say "expected was $expected"; exit 1; }
}

tell "Install"
export PIP_CONSTRAINT=$repository/requirements-ci.txt PIP_DISABLE_PIP_VERSION_CHECK=1
type_in 0 "python3 -m venv env"
say "\$ env/bin/python -m pip install --quiet 'tawpipe[all]'"
env/bin/python -m pip install --quiet --quiet "$wheel[all]" 2>&1 | tee -a "$transcript"
export PATH=$PWD/env/bin:$PATH
type_in 0 "tawpipe --version"
type_in 0 "tawpipe --help"
type_in 0 "tawpipe train --help"

tell "What would a run do here?"
type_in 0 "tawpipe train --dry-run"

tell "Mistakes"
type_in 2 "tawpipe train --lr 1e-4"
type_in 2 "tawpipe train --data corpus.txt"
type_in 2 "tawpipe train --model no-such-model"
type_in 2 "tawpipe train --schedule.strategy tawpipe"

tell "A first run, killed on the way, and gone on with"
say "\$ tawpipe train --steps 24 --checkpoint.every 6 --output runs/first"
tawpipe train --steps 24 --checkpoint.every 6 --output runs/first > first.log 2>&1 &
run=$!
until test -e runs/first/checkpoints/step-00000012; do sleep 0.2; kill -0 $run; done
worker=$(pgrep --parent $run | head -1)
kill -KILL "$worker"
wait $run || say "(exit code $?: process $worker was killed by hand after step 12)" >> first.log
sed "s#$prefix#/usr#g" first.log | tee -a "$transcript"
type_in 0 "tawpipe checkpoint list runs/first"
type_in 0 "tawpipe train --config runs/first/config.yaml --resume auto"

tell "A chat model: fine-tune it, ask it"
python - <<'MAKE' > /dev/null 2>&1
import json, random
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Stands for a model of the Hub, which a stranger would name.
pairs = [("Norila", "Limaro"), ("Besto", "Karuna"), ("Teplan", "Oslira"), ("Wandor", "Mirell")]
text = [f"<|user|>What is the capital of {a}?<|assistant|>{b}" for a, b in pairs]
raw = Tokenizer(models.BPE())
raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|end|>", "<|user|>", "<|assistant|>"]
raw.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")
tokenizer.chat_template = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
size = dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(LlamaConfig(**size, eos_token_id=0)).save_pretrained("small-model")
tokenizer.save_pretrained("small-model")
chats = [[{"role": "user", "content": f"What is the capital of {a}?"}, {"role": "assistant", "content": b}] for a, b in pairs]
draw = random.Random(0)
Path("chats.jsonl").write_text("".join(json.dumps({"messages": draw.choice(chats)}) + "\n" for _ in range(200)))
MAKE
type_in 0 "head -2 chats.jsonl"
type_in 0 "tawpipe train --model small-model --data chats.jsonl --sequence-length 64 --learning-rate 0.005 --epochs 10 --validation-fraction 0 --output tuned"
type_in 0 "python -c \"
from transformers import pipeline
chat = pipeline('text-generation', model='tuned/model')
question = [{'role': 'user', 'content': 'What is the capital of Norila?'}]
print(chat(question, max_new_tokens=16, do_sample=False)[0]['generated_text'][-1]['content'])
\""

tell "Would a cluster do it?"
type_in 0 "tawpipe plan --model llama-8b --topology 3x8@25gbit --device-name H100 --memory 80 --sequence-length 32768 --global-batch 96 --report plan.html --save plan.yaml"

tell "Look at it"
type_in 0 "tawpipe open runs/first --out pages"
type_in 0 "ls pages plan.html"
tell "Done"
