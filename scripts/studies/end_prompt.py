"""Train by the recipe on short texts with a closing prompt at the end of the window (EndPrompt), to compare with PoSE.

    python scripts/studies/end_prompt.py --config recipes/configs/smollm2-135m-16k-yarn-pose.yaml --data.train t.parquet

It takes the options of ``recipes/finetune.py``, with positions ``pose``. A sequence is one stretch of a text at the
first positions, then the prompt at the last positions of the window, with a loss on both.

Source: arXiv:2605.14589; authors' code: clx1415926/EndPrompt, fine_tune_suffix.py.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(ROOT := Path(__file__).parents[2]))

from ctxext.training.documents import TokenisedDocuments
from ctxext.training.sequences import IGNORED, Item, TrainingSequences, _cut

CLOSING = "\n\nThat is the whole text. Now go through it again from its beginning, and answer what is asked:"
MOST = 20
"""Tokens of the closing prompt, at most."""
READ = TokenisedDocuments.read
closing: list[int] = []


def read(sources: Any, tokenizer: Any, **how: Any) -> TokenisedDocuments:
    """Read the documents, and keep the tokens of the closing prompt."""
    closing[:] = tokenizer(CLOSING, add_special_tokens=False).input_ids[:MOST]
    return READ(sources, tokenizer, **how)


def item(sequences: TrainingSequences, index: int) -> Item:
    """Return a stretch of text and, at the end of the window, the closing prompt."""
    sequences.require_index(index)
    epoch, place = divmod(index, sequences.per_epoch)
    document, start = _cut(sequences.lengths, sequences.read, sequences.seed, epoch)[place].tolist()
    text = sequences.documents.tokens(document, start, start + sequences.read - len(closing))
    ids = torch.cat([torch.tensor(sequences.documents.prefix), text, torch.tensor(closing)]).long()
    positions, labels = torch.arange(len(ids)), ids.clone()
    positions[-len(closing) :] += sequences.target_length - sequences.length
    labels[0] = IGNORED
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions, "index": torch.tensor(index)}
    return columns | {"attention_mask": torch.ones_like(ids)}


if __name__ == "__main__":
    TokenisedDocuments.read = staticmethod(read)  # type: ignore[method-assign, assignment]
    TrainingSequences.__getitem__ = item  # type: ignore[method-assign]
    runpy.run_path(str(ROOT / "recipes" / "finetune.py"), run_name="__main__")
