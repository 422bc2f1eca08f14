"""A text for every test of the laboratory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words in a rhythm, so that order can be learned, but no stretch is like another."""
    generator = torch.Generator().manual_seed(0)
    words = ["the", "rain", "falls", "and", "a", "river", "runs"]
    drawn = torch.randint(0, len(words), (3000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words[place] for place in drawn), encoding="utf-8")
    return path
