# %% [markdown]
"""# Choose a method by measuring, on texts like those that you will read.

The model is SmolLM2-135M-Instruct from the hub, or the one that the environment variable MODEL names.
"""

# %%
import argparse
import inspect
import os
import typing

import matplotlib.pyplot as plt
from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext

checkpoint = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")  # few CPUs compute in bfloat16
tokenizer = AutoTokenizer.from_pretrained(checkpoint)

# %% [markdown]
# Some texts are chosen on and the others judged on: give two of the target length, better five or more.

# %%
trained = ctxext.describe(model).trained_length or 0
texts = [inspect.getsource(module) for module in (argparse, inspect, typing)]
choice = ctxext.choose(model, tokenizer, texts=texts, target_length=trained * 3 // 2, budget="1h")
print(choice.sentence)

# %% [markdown]
# What each candidate loses or gains beyond the trained length, against YaRN as published, on what it has read.

# %%
read = [row for row in choice.rows() if row["beyond"] != ""][:8]
plt.barh([row["label"] for row in read], [row["beyond"] for row in read], xerr=[row["beyond_se"] for row in read])
plt.gca().set(xlabel="nats per token ± standard error: less is better")
plt.gca().invert_yaxis()
plt.show()

# %% [markdown]
# A choice is a method like any other.

# %%
ctxext.patch(model, choice.method)
print(ctxext.describe(model))
