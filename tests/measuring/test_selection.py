"""Chosen chunks as a baseline: the ranking by hand, what each pass sees, and the verdict that counts them."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ctxext.errors import InvalidParameterError
from ctxext.measuring.loss_table import LossTable
from ctxext.measuring.selection import RankedChunks, selection_windows


def ranked(tokens: list[int], asked: list[int], size: int, before: int) -> list[int]:
    """The numbers of chunks, best first, by BM25 as it is written: over counts of all words of all documents."""

    def words(part: list[int]) -> list[str]:
        return [*map(str, part), *(f"{a} {b}" for a, b in itertools.pairwise(part))]

    documents = [Counter(words(tokens[at : at + size])) for at in range(0, before - size + 1, size)]
    scores = []
    for document in documents:
        score = 0.0
        for word in set(words(asked)):
            holding = sum(word in other for other in documents)
            idf = math.log((len(documents) - holding + 0.5) / (holding + 0.5) + 1)
            score += idf * document[word] * 2.2 / (document[word] + 1.2)
        scores.append(score)
    return sorted(range(len(documents)), key=lambda number: (-scores[number], -number))


def test_the_ranking_is_that_of_bm25() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(12, (400,), generator=generator).tolist()
    chunks = RankedChunks(tokens, 16)
    for before, most in ((400, 5), (399, 3), (250, 30), (15, 4), (32, 1)):
        asked = torch.randint(12, (20,), generator=generator).tolist()
        expected = sorted(ranked(tokens, asked, 16, before)[:most])
        assert chunks.best(asked, most=most, before=before) == tuple((16 * at, 16 * at + 16) for at in expected)
    assert chunks.best(tokens[64:96], most=2, before=400) == ((64, 80), (80, 96)), "what is asked for word by word"


@pytest.mark.parametrize(("window", "prefix"), [(64, 0), (64, 1), (64, 3), (100, 1), (6, 1)])
def test_no_pass_sees_more_than_the_window_or_what_comes_later(window: int, prefix: int) -> None:
    tokens, positions = torch.randint(5, (1, 700)), 600
    windows = selection_windows(tokens, window=window, start=100, positions=positions, prefix=prefix)
    at = 100
    for one in windows:
        assert one.positions <= window
        assert one.positions > window - max(1, window // 16) - window // 8, "room for a further chunk"
        assert (one.prefix, one.end - one.scored - 1) == (prefix, at)
        assert [*one.chosen] == sorted(one.chosen)
        assert all(prefix <= begin < end <= one.begin for begin, end in one.chosen)
        at += one.scored
    assert at == positions


@torch.no_grad()
def test_losses_are_those_of_the_tokens_in_a_row(model: LlamaForCausalLM, input_ids: Tensor) -> None:
    tokens = input_ids[:1]
    windows = selection_windows(tokens, window=40, start=40, positions=89, prefix=1)
    losses = torch.cat([one.losses(model, tokens) for one in windows], dim=1)[0]
    assert any(one.chosen for one in windows)
    for one, first in zip(windows, range(40, 89, 5), strict=True):
        seen = [tokens[:, :1], *(tokens[:, a:b] for a, b in one.chosen), tokens[:, one.begin : first + 1]]
        logits = model(torch.cat(seen, dim=1), use_cache=False).logits[0, -1].double().log_softmax(-1)
        torch.testing.assert_close(losses[first - 40].double(), -logits[tokens[0, first + 1]], rtol=1e-5, atol=2e-6)


def test_the_baseline_is_the_best_of_truncations_and_selection() -> None:
    base = 3 + torch.rand(2, 24, generator=torch.Generator().manual_seed(0))
    chosen = base.clone()
    chosen[:, 12:] -= 0.5
    table = LossTable.of({"truncated 8": [*base], "truncated 16": [*base + 0.1], "selected": [*chosen], "pi": [*base]})
    for start, stop, best in ((0, 12, "truncated 8"), (12, 24, "selected")):
        span = table.span(start, stop)
        assert span.best_short in (best, "truncated 8")
        gap = span.difference("pi")
        assert (gap.mean, gap.baselines) == (pytest.approx(0.0 if best == "truncated 8" else 0.5), 3)
        verdict = span.judge(["pi"], stop)
        assert verdict.beats == ("undecided" if best == "truncated 8" else "no")
        assert verdict.window == (8 if start == 0 else 16)


@pytest.mark.parametrize(("window", "prefix"), [(2, 1), (3, 2), (8, 4)])
def test_a_window_without_room_for_the_newest_tokens_is_refused(window: int, prefix: int) -> None:
    given = {"start": 20, "positions": 60}
    with pytest.raises(InvalidParameterError, match=rf"A window of {window} tokens is too small for a selection"):
        selection_windows(torch.arange(61)[None], window=window, prefix=prefix, **given)
    least = selection_windows(torch.arange(61)[None], window=window + 1, prefix=prefix - 1, **given)
    assert max(each.positions for each in least) <= window + 1
