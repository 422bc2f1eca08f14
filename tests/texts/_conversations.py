"""A conversation, its template, and files of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests._tokenizer import make_tokenizer

MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}[a]{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}[u]{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# The texts among the parts of a content, as templates of processors go over them: none in a content that is one text.
PARTS = "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(bos=True)
    tokenizer.chat_template = template
    return tokenizer


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
