# %% [markdown]
"""# Train with LoRA at a new length, merge, and say how to serve the result.

The model is SmolLM2-135M-Instruct from the hub, or the one that the environment variable MODEL names.
Eight steps of 1,024 tokens show the way and teach nothing: `recipes/finetune.py` is the whole recipe.
"""

# %%
import argparse
import inspect
import os
import typing

import matplotlib.pyplot as plt
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import ctxext

checkpoint = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(checkpoint)

# %% [markdown]
# Extend first, then attach the adapter. `Memory` computes the loss in pieces and layers twice: long texts fit.

# %%
ctxext.patch(model, "yarn", factor=2)
length = min(1024, ctxext.describe(model).target_length or 1024)  # seconds a step on a CPU; on a GPU take all of it
model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=8))
memory = ctxext.training.Memory(loss_chunk=1024).apply(model)

# %% [markdown]
# The callback writes the extension into every checkpoint, and refuses to resume into a model extended otherwise.

# %%
text = "\n".join(inspect.getsource(module) for module in (argparse, inspect, typing))
ids = tokenizer(text)["input_ids"]
pieces = [ids[start : start + length] for start in range(0, 8 * length, length)]
settings = TrainingArguments("runs/lora", max_steps=8, per_device_train_batch_size=1, logging_steps=1, report_to=[])
data = [{"input_ids": piece, "labels": piece} for piece in pieces]
callbacks = [ctxext.training.ExtensionCallback(model)]
trainer = Trainer(model, settings, train_dataset=data, callbacks=callbacks)
trainer.train()
plt.plot(*zip(*((line["step"], line["loss"]) for line in trainer.state.log_history if "loss" in line), strict=True))
plt.gca().set(xlabel="step", ylabel="loss, nats per token")
plt.show()

# %% [markdown]
# What was merged is an ordinary checkpoint; `export` prints the command that serves it.

# %%
memory.close()
ctxext.save(model.merge_and_unload(), "runs/merged", tokenizer=tokenizer)
print(ctxext.export("runs/merged", to="vllm"))
