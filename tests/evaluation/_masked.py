"""A masked language model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import BertForMaskedLM

from tests._checkpoints import save_with_tokenizer
from tests._models import bert
from tests._tokenizer import make_two_sided_tokenizer as tokenizer


def saved(folder: Path, kind: Any = BertForMaskedLM) -> Path:
    return save_with_tokenizer(bert(kind), folder, tokenizer())
