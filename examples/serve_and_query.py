# %% [markdown]
"""# Serve an extended checkpoint, and ask it as OpenAI's API is asked.

The model is SmolLM2-135M-Instruct from the hub, or the one that the environment variable MODEL names.
"""

# %%
import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext

checkpoint = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained(checkpoint)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
ctxext.patch(model, "self_extend", factor=2)
ctxext.save(model, "runs/served", tokenizer=tokenizer)

# %% [markdown]
# The same as `ctxext serve runs/served` in a shell of its own. Port 0 is any that is free; the server says which.

# %%
command = [sys.executable, "-m", "ctxext", "serve", "runs/served", "--port", "0"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
assert server.stdout is not None
address = next(line.split(" at ")[1].strip() for line in server.stdout if line.startswith("Serving"))

# %% [markdown]
# A prompt that exceeds the window together with the answer gets an error with both numbers; nothing is cut.

# %%
client = OpenAI(base_url=address, api_key="none", timeout=600)
(served,) = client.models.list().data
trained = ctxext.describe(model).trained_length or 0
text = Path(argparse.__file__).read_text(encoding="utf-8")
prompt = tokenizer.decode(tokenizer(text)["input_ids"][: trained * 5 // 4])
try:
    seconds = {}
    for share in (8, 4, 2, 1):
        began = time.perf_counter()
        part = prompt[: len(prompt) // share]
        answer = client.completions.create(model=served.id, prompt=part, max_tokens=30, temperature=0)
        assert answer.usage is not None
        seconds[answer.usage.prompt_tokens] = time.perf_counter() - began
    print(answer.usage, answer.choices[0].text, sep="\n")
finally:
    server.terminate()
    server.wait()

# %% [markdown]
# How long each prompt and its 30 tokens took, the longest beyond the trained length.

# %%
plt.plot(list(seconds), list(seconds.values()), marker="o")
plt.axvline(trained, color="grey", linestyle="--")
plt.gca().set(xlabel="tokens of the prompt; dashed: the trained length", ylabel="seconds")
plt.show()
