"""Whether transformers' own adapters (``model.add_adapter``, ``load_adapter``) take the PEFT that is installed."""

from __future__ import annotations

import re

import peft
import pytest
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

TOO_OLD = Version(peft.__version__) < Version(MIN_PEFT_VERSION)

through_transformers = pytest.mark.skipif(
    TOO_OLD, reason=f"transformers' own adapters need PEFT {MIN_PEFT_VERSION}, found {peft.__version__}"
)


def refusal(sentence: str) -> str:
    """A pattern of what transformers' own adapters fail with: ``sentence``, or that PEFT is too old for them."""
    return re.escape(sentence) + (rf"|please use a version >= {re.escape(MIN_PEFT_VERSION)}" if TOO_OLD else "")
