# %% [markdown]
"""# Extend a model, and let it go on with a text beyond its trained length.

The model is SmolLM2-135M-Instruct from the hub, or the one that the environment variable MODEL names.
"""

# %%
import argparse
import os
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext

checkpoint = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained(checkpoint)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
print(ctxext.describe(model))

# %% [markdown]
# The text is the source of a module of Python, half as long again as the model was trained for.

# %%
trained = ctxext.describe(model).trained_length or 0
text = Path(argparse.__file__).read_text(encoding="utf-8")
prompt = tokenizer(text, return_tensors="pt")["input_ids"][:, : trained * 3 // 2].to(model.device)


@torch.no_grad()
def losses() -> list[float]:
    """Return the loss of every 1,024 tokens, in nats per token."""
    parts = zip(model(prompt).logits[0, :-1].split(1024), prompt[0, 1:].split(1024), strict=True)
    return [F.cross_entropy(logits.float(), following).item() for logits, following in parts]


plain = losses()

# %% [markdown]
# `patch` changes this model alone, in place. Without training take Self-Extend, by 2 to 4.

# %%
ctxext.patch(model, "self_extend", factor=2)
print(ctxext.describe(model))
for loss, label in ((plain, "not extended"), (losses(), "self_extend, factor 2")):
    plt.plot([512 + 1024 * i for i in range(len(loss))], loss, marker="o", label=label)
plt.axvline(trained, color="grey", linestyle="--", label="trained length")
plt.gca().set(xlabel="tokens", ylabel="loss, nats per token")
plt.legend()
plt.show()

# %% [markdown]
# The extended model goes on with the text.

# %%
written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
print(f"After {prompt.shape[1]:,} tokens the model writes:\n{tokenizer.decode(written[0, prompt.shape[1] :])}")

# %% [markdown]
# The extension is saved with the model, and comes back with it. `unpatch` gives the old model back, bit for bit.

# %%
ctxext.save(model, "runs/extended", tokenizer=tokenizer)
print(ctxext.describe(ctxext.load("runs/extended")))
ctxext.unpatch(model)
