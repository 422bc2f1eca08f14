"""Sequences whose masked tokens are to be filled in, for models that read to both sides.

The masked tokens depend on the seed and the sequence's number alone, as everything about sequences: a resumed run masks
the same tokens. Transformers' ``DataCollatorForLanguageModeling`` then masks 80 percent of them, replaces 10 percent by
any other token, and leaves 10 percent.

Source: Devlin et al., arXiv:1810.04805, section 3.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling

from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.models import find_architecture
from ctxext.models.table import LearnedTable
from ctxext.texts.corpus import special_prefix, special_suffix
from ctxext.training.sequences import IGNORED, DerivedSequences, Item, Sequences, are_alike, random_tokens

READ = 16  # tokens that show at which positions a model reads


class MaskedSequences(DerivedSequences):
    """The sequences of ``whole``, with the tokenizer's suffix at their ends, and tokens masked.

    Args:
        shift: offset of the positions, from ``shift_of``; None leaves positions to the model.

    Raises:
        InvalidParameterError: for a tokenizer without a mask token.
    """

    def __init__(self, whole: Sequences, tokenizer: Any, *, share: float, seed: int, shift: int | None = None) -> None:
        if tokenizer.mask_token_id is None:
            raise InvalidParameterError(
                f"{type(tokenizer).__name__} has no mask token, so that nothing can be masked: leave data.masked out "
                f"to train on predicting the next token."
            )
        super().__init__(whole)
        self.share, self.seed, self.shift = share, seed, shift
        self.mask = int(tokenizer.mask_token_id)
        self.front, self.back = len(special_prefix(tokenizer)), torch.tensor(special_suffix(tokenizer))
        self.masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)

    def __getitem__(self, index: int) -> Item:
        """Return ``input_ids``, ``labels``, ``attention_mask``, ``index``, and with a shift ``position_ids``."""
        item = self.whole[index]
        ids = item["input_ids"].clone()
        last = len(ids) - len(self.back)
        ids[last:] = self.back
        special = torch.ones(len(ids), dtype=torch.bool)
        special[self.front : last] = False
        drawn = np.random.default_rng([self.seed, 3, index])
        self.masking.generator = torch.Generator().manual_seed(int(drawn.integers(2**62)))
        inputs, labels = self.masking.torch_mask_tokens(ids[None].clone(), special_tokens_mask=special[None])
        inputs, labels = inputs[0], labels[0]
        if bool((labels == IGNORED).all()):  # a short sequence may be spared, and would have no loss
            place = int(drawn.integers(self.front, last))
            inputs[place], labels[place] = self.mask, ids[place]
        masked = {"input_ids": inputs, "labels": labels, "attention_mask": torch.ones_like(ids), "index": item["index"]}
        if self.shift is not None:
            masked["position_ids"] = item["position_ids"] + self.shift
        return masked

    def __str__(self) -> str:
        """Describe the sequences and the share of masked tokens, for a report."""
        return f"{self.whole}; {self.share:.0%} of the tokens are to be filled in"


@torch.no_grad()
def shift_of(model: nn.Module) -> int:
    """Find the offset between positions counted from 0 and the positions that a model chooses itself.

    RoBERTa counts from behind the id of padding, BERT from 0, and not every model accepts positions.

    Raises:
        IncompatibleError: if the model accepts no positions, or ignores them.
    """
    subject = Subject.of(model)
    base, architecture = subject.model, find_architecture(subject)
    firsts = [table.first for table in architecture.tables(subject)] if isinstance(architecture, LearnedTable) else []
    ids = random_tokens(subject, 1, READ)
    chosen = base(input_ids=ids).logits
    positions = torch.arange(READ, device=base.device)[None]
    gap = (positions >= READ // 2) * READ
    for shift in dict.fromkeys([0, *firsts]):
        try:
            given, moved = (base(input_ids=ids, position_ids=at + shift).logits for at in (positions, positions + gap))
        except (TypeError, IndexError, RuntimeError):
            continue
        if are_alike(given, chosen, within=1e-4) and not are_alike(moved, chosen, within=1e-4):
            return shift
    raise IncompatibleError(
        f"{type(base).__name__} cannot be told at which positions its tokens stand, so that it has no skip-wise ones. "
        f"Set data.positions to consecutive."
    )
