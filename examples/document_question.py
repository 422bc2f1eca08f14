# %% [markdown]
"""# Ask a question about a document that is longer than the model's window.

The model is SmolLM2-135M-Instruct from the hub, or the one that the environment variable MODEL names.
So small a model finds what is written literally, and understands little.
"""

# %%
import os
import typing
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ctxext

checkpoint = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
model = AutoModelForCausalLM.from_pretrained(checkpoint)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)

# %% [markdown]
# The document is a module of Python. A fact stands in its first tenth, so that the answer can be checked.

# %%
trained = ctxext.describe(model).trained_length or 0
ids = tokenizer(Path(typing.__file__).read_text(encoding="utf-8"))["input_ids"][: trained * 5 // 4]
fact, question = "\n# The pass key is 71432. Remember it.\n", "\n# What is the pass key? The pass key is"
document = tokenizer.decode(ids[: len(ids) // 10]) + fact + tokenizer.decode(ids[len(ids) // 10 :])


def answer(text: str) -> tuple[int, str]:
    """Let the model answer the question behind a text; return the tokens read and the words written."""
    prompt = tokenizer(text + question, return_tensors="pt")["input_ids"].to(model.device)
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    return prompt.shape[1], tokenizer.decode(written[0, prompt.shape[1] :])


# %% [markdown]
# Without an extension: the whole document, and its end, which fits the window but has lost the fact.

# %%
answers = {"whole, not extended": answer(document), "its end": answer(document[len(document) // 3 :])}

# %% [markdown]
# With Self-Extend, which reads texts of the old length as before.

# %%
ctxext.patch(model, "self_extend", factor=2)
answers["whole, extended"] = answer(document)
for way, (tokens, words) in answers.items():
    print(f"{way:<20} {tokens:>6,} tokens: {words!r}")
    plt.barh(way, tokens, color="tab:green" if "71432" in words else "tab:red")
plt.axvline(trained, color="grey", linestyle="--")
plt.gca().set(xlabel="tokens read; dashed: the trained length", title="Green: the pass key was found")
plt.gca().invert_yaxis()
plt.show()
