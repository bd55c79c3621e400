"""For people who know ``transformers.Trainer``: its line stands in a comment above ours. Runs as it is, in seconds.

python examples/from_trainer.py
torchrun --nproc-per-node 2 examples/from_trainer.py      # the same numbers
"""

from pathlib import Path

import torch
from torch.optim.lr_scheduler import LinearLR
from transformers import LlamaConfig, LlamaForCausalLM

import tawpipe

STEPS, ROWS = 20, 8
text = torch.tensor(list(Path(__file__).read_bytes()))  # one token for every byte of this file
dataset = text.unfold(0, 128, 8)

# model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")    works here, too
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
# TrainingArguments(learning_rate=3e-3, weight_decay=0.1, max_grad_norm=1.0, per_device_train_batch_size=2, bf16=False)
optimizer = tawpipe.adamw(3e-3, weight_decay=0.1)
# Trainer(model, arguments, train_dataset=dataset)        gradient checkpointing and sharding are always on
pipeline = tawpipe.Pipeline(
    model, optimizer=optimizer, training=tawpipe.TrainingSettings(clip_norm=1.0), micro_batch=2, dtype=torch.float32
)
# TrainingArguments(lr_scheduler_type="linear")
scheduler = LinearLR(pipeline.optimizer, start_factor=1.0, end_factor=0.0, total_iters=STEPS)
# trainer.train()
for step in range(STEPS):
    # per_device_train_batch_size * devices * gradient_accumulation_steps = ROWS: the whole batch, on every process
    rows = dataset[torch.randint(len(dataset), (ROWS,), generator=torch.Generator().manual_seed(step))]
    result = pipeline.step({"input_ids": rows, "labels": rows})
    scheduler.step()
    if (step + 1) % 5 == 0 and pipeline.world.rank == 0:
        print(f"step {step + 1}: {result}")
# trainer.evaluate()
result = pipeline.evaluate({"input_ids": dataset[:8], "labels": dataset[:8]})
# TrainingArguments(save_strategy="steps"), trainer.train(resume_from_checkpoint="runs/from_trainer/state")
pipeline.save("runs/from_trainer/state")
pipeline.load("runs/from_trainer/state")
# trainer.save_model("runs/from_trainer/model")
pipeline.export("runs/from_trainer/model")
if pipeline.world.rank == 0:
    print(f"evaluation: loss {result.loss:.4f}; the model is in runs/from_trainer/model")
pipeline.close()
