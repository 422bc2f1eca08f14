# %% [markdown]
"""# Extend a model, and let it go on with a text beyond its trained length.

The model is SmolLM2-135M-Instruct from the hub, or the one that the environment variable MODEL names.
"""

# %%
import argparse
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext

checkpoint = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained(checkpoint)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
print(ctxext.describe(model))

# %% [markdown]
# `patch` changes this model alone, in place. Without training take Self-Extend, by 2 to 4.

# %%
ctxext.patch(model, "self_extend", factor=2)
extended = ctxext.describe(model)
print(extended)

# %% [markdown]
# The text is the source of a module of Python, half as long again as the model was trained for.

# %%
text = Path(argparse.__file__).read_text(encoding="utf-8")
trained = extended.trained_length or 0
prompt = tokenizer(text, return_tensors="pt")["input_ids"][:, : trained * 3 // 2].to(model.device)
written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
print(f"After {prompt.shape[1]:,} tokens the model writes:\n{tokenizer.decode(written[0, prompt.shape[1] :])}")

# %% [markdown]
# The extension is saved with the model, and comes back with it. `unpatch` gives the old model back, bit for bit.

# %%
ctxext.save(model, "runs/extended", tokenizer=tokenizer)
print(ctxext.describe(ctxext.load("runs/extended")))
ctxext.unpatch(model)
