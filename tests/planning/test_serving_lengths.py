"""The table of serving lengths, against bytes that are counted by hand from the shapes."""

from __future__ import annotations

import csv

import pytest

from scripts.serving_lengths import CARDS, CHUNK, PLACE, SHAPES, cells_of

WEIGHTS = {  # of the published checkpoints
    "Qwen3 4B": 4_022_468_096,
    "Mistral 7B v0.3": 7_248_023_552,
    "Llama 3.1 8B": 8_030_261_248,
    "Qwen3 8B": 8_190_735_360,
}
LAYERS = {"Qwen3 4B": (36, 2560, 9728), "Qwen3 8B": (36, 4096, 12288)}
"""Layers, hidden and inner sizes; the others have those of Llama."""
NF4 = 4 + 8 / 64 + 32 / (64 * 256)
ROWS = list(csv.DictReader(PLACE.read_text(encoding="utf-8").splitlines()))


def test_the_shapes_are_those_of_the_checkpoints() -> None:
    assert set(WEIGHTS) == set(SHAPES)
    assert len(ROWS) == 2 * 3 * len(SHAPES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}, {row['weights']}, {row['bits of the cache']}")
def test_a_row_by_hand(row: dict[str, str]) -> None:
    layers, hidden, inner = LAYERS.get(row["model"], (32, 4096, 14336))
    keys, heads, bits = 8 * 128, 32 * 128, int(row["bits of the cache"])
    linear = layers * hidden * (2 * heads + 2 * keys + 3 * inner)
    fixed = 2 * WEIGHTS[row["model"]]
    if row["weights"] == "nf4":
        fixed += linear * (NF4 / 8 - 2) + 2 * hidden * inner  # and the largest weight, unpacked
    stored = 16 if bits == 16 else bits + 0.5
    token = layers * 2 * keys * stored / 8
    # At work in a layer of transformers: its keys and values for every query head, the mask of a chunk in one byte and
    # in two, and the unpacked keys and values themselves.
    token += 2 * 2 * heads + CHUNK * (1 + 2) + (0 if bits == 16 else 2 * 2 * keys)
    for card, size in CARDS.items():
        length = 0 if row[card] == "-" else int(row[card].replace(",", ""))
        fits = (size * 2**30 - fixed) / token
        assert length == pytest.approx(fits, rel=0.03, abs=0.25 * 2**30 / token) or (length == 0 and fits < 2 * CHUNK)


@pytest.mark.nightly
def test_a_row_is_current() -> None:
    row = next(row for row in ROWS if row["weights"] == "nf4" and row["bits of the cache"] == "4")
    assert [row[card] for card in CARDS] == list(cells_of(SHAPES[row["model"]], "nf4", 4))
