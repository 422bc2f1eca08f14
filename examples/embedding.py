# %% [markdown]
"""# Extend an embedding model, and see that it reads what it dropped before.

The model is all-MiniLM-L6-v2 from the hub, or the one that the environment variable MODEL names. Its positions are a
learned table of 512 rows; for a model with rotations (ModernBERT, GTE, Nomic) set METHOD to yarn.
"""

# %%
import os

import matplotlib.pyplot as plt
from sentence_transformers import SentenceTransformer

import ctxext

model = SentenceTransformer(os.environ.get("MODEL", "sentence-transformers/all-MiniLM-L6-v2"))
window = ctxext.describe(model).trained_length or 0
model.max_seq_length = window
print(ctxext.describe(model))

# %% [markdown]
# Two documents that differ in their last sentence only, behind the window, and a question about one of them.

# %%
filler = "The committee met on Monday and approved the minutes of the last meeting. "
start = filler * (2 * window // len(model.tokenizer(filler)["input_ids"]))
documents = [start + "Anna has moved to Lisbon.", start + "The printer needs a new cartridge."]
question = "Where does Anna live now?"


def similarities() -> list[float]:
    """Compare the question with each document."""
    found = model.similarity(model.encode([question]), model.encode(documents))[0]
    return [round(float(value), 4) for value in found]


found = {model.max_seq_length: similarities()}
print(f"read up to {model.max_seq_length} tokens:", *found[model.max_seq_length])

# %% [markdown]
# The limit of the SentenceTransformer, which was the old window, grows with the model.

# %%
ctxext.patch(model, os.environ.get("METHOD", "pi"), factor=4)
found[model.max_seq_length] = similarities()
print(f"read up to {model.max_seq_length} tokens:", *found[model.max_seq_length])
for place, (label, values) in enumerate(zip(("answers", "does not"), zip(*found.values(), strict=True), strict=True)):
    plt.bar([i + 0.4 * place for i in range(len(found))], values, width=0.4, label=f"the document that {label}")
plt.xticks([i + 0.2 for i in range(len(found))], [f"reads {tokens} tokens" for tokens in found])
plt.ylabel("similarity to the question")
plt.legend()
plt.show()
model.save("runs/embedding")  # sentence-transformers loads it without ctxext
