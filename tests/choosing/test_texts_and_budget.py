"""Which texts are chosen on and which judge, and which sizes a budget lasts for; what is too little is said at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ctxext.choosing.halving import LADDER, Costs
from ctxext.errors import InvalidParameterError
from ctxext.quantities import parse_budget
from ctxext.texts.corpus import TokenisedDocument, tokenise
from ctxext.texts.documents import Document
from ctxext.texts.stretches import split_texts
from tests._products import crossed
from tests._tokenizer import make_tokenizer

COSTS = Costs(
    trained=8192,
    length=16384,
    judged=90,
    others=5,
    windows=(2048, 4096, 6144, 8192),
    turning_point=4096,
    choosing=9,
    held_out=15,
    keys=True,
)


def document(name: str, tokens: int) -> TokenisedDocument:
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(len(name) + tokens))
    return TokenisedDocument(name, ids, 1)


def test_documents_are_chosen_on_or_judged_on_and_never_both() -> None:
    documents = [document(f"novel {number}", 400 + 50 * number) for number in range(8)]
    found = split_texts(documents, tokens=101, seed=3)
    choosing, judging = ({one.document for one in part} for part in (found.choosing, found.held_out))
    assert (len(choosing), len(judging)) == (3, 5)
    assert not choosing & judging
    assert not found.same_documents
    assert all(one.text.tokens == 101 for one in (*found.choosing, *found.held_out))
    # As many documents as there are come first.
    assert len({one.document for one in found.held_out[:5]}) == 5
    again = split_texts(documents, tokens=101, seed=3)
    assert [one.text.sha256 for one in again.choosing] == [one.text.sha256 for one in found.choosing]
    others = {tuple(one.document for one in split_texts(documents, tokens=101, seed=s).choosing[:3]) for s in range(5)}
    assert len(others) > 1


def test_of_a_single_document_other_stretches_judge() -> None:
    whole = document("one", 901)
    found = split_texts([whole], tokens=101, seed=0)
    assert (len(found.choosing), len(found.held_out), found.same_documents) == (3, 6, True)
    parts = [one.text.input_ids[0, 1:] for one in (*found.choosing, *found.held_out)]
    assert len({tuple(part.tolist()) for part in parts}) == 9
    assert sum(map(len, parts)) == 900


def test_texts_of_one_name_are_two_documents() -> None:
    found = split_texts([document("a", 150), document("a", 151)], tokens=101, seed=0)
    assert {found.choosing[0].document, found.held_out[0].document} == {"a (1)", "a (2)"}


def test_a_name_is_that_of_one_document() -> None:
    """Also where a numbered name is another document's own."""
    documents = [document(name, 150 + n) for n, name in enumerate(("a", "a", "a (1)", "a (1)", "a (2)", "b"))]
    found = split_texts(documents, tokens=101, seed=0)
    names = [one.document for one in (*found.choosing, *found.held_out)]
    assert len(set(names)) == len(documents)
    assert {"a (2)", "b"} <= set(names)


WORDS = [f"w{number}" for number in random.Random(0).sample(range(10_000), 3000)]


def written(name: str, words: list[str]) -> TokenisedDocument:
    return tokenise(Document(name, " ".join(words)), make_tokenizer(bos=True))


COPIES: dict[str, Callable[[list[str]], list[str]]] = {
    "equal": lambda words: words,
    "in capitals": lambda words: [word.upper() for word in words],
    "in other lines": lambda words: "\n".join(words).split(" "),
    "with another beginning": lambda words: ["copied", "by", "hand", *words],
    "with another end": lambda words: [*words[:-40], "the", "end"],
    "an excerpt": lambda words: words[200:500],
    "one word in fifty changed": lambda words: ["changed" if n % 50 == 7 else word for n, word in enumerate(words)],
}


@pytest.mark.parametrize(("copy", "seed"), crossed(list(COPIES), range(3)))
def test_what_is_chosen_on_is_not_judged_on(copy: str, seed: int) -> None:
    one, others = WORDS[:600], [WORDS[600 * n : 600 * (n + 1)] for n in range(1, 5)]
    documents = [
        written("copy", COPIES[copy](one)),
        written("one", one),
        *(written(str(n), o) for n, o in enumerate(others)),
    ]
    found = split_texts(documents, tokens=256, seed=seed, tokenizer=make_tokenizer(bos=True))
    parts = [{stretch.document for stretch in part} for part in (found.choosing, found.held_out)]
    places = [number for number, part in enumerate(parts) if part & {"one", "copy"}]
    assert len(places) == 1, "one and its copy are never on two sides"
    assert found.left_out
    assert all(name.startswith(("one", "copy")) for name in found.left_out)
    assert set.union(*parts) >= {"0", "1", "2", "3"}


def test_a_text_that_stands_twice_in_a_document_is_read_once() -> None:
    once = written("twice", WORDS[:600])
    twice = written("twice", [*WORDS[:600], "again:", *WORDS[:600]])
    for tokenizer in (None, make_tokenizer(bos=True)):
        found = split_texts([twice], tokens=256, seed=0, tokenizer=tokenizer)
        left = len(found.choosing) + len(found.held_out)
        assert found.same_documents
        assert left <= once.tokens // 255 + 1
        assert len(found.left_out) == (twice.tokens - 1) // 255 - left
    with pytest.raises(InvalidParameterError, match="2 more are copies of it"):
        split_texts([written(name, WORDS[:80]) for name in "abc"], tokens=256, seed=0)


def test_texts_that_share_little_are_all_read() -> None:
    """A licence at the end of every text does not make it a copy."""
    licence = [f"licence{n}" for n in range(40)]
    documents = [written(str(n), [*WORDS[600 * n : 600 * (n + 1)], *licence]) for n in range(5)]
    found = split_texts(documents, tokens=1024, seed=0, tokenizer=make_tokenizer(bos=True))
    assert not found.left_out


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ((90, 60), r"No text is as long as the target: 2 texts, the longest of 90 tokens, and 101 are needed"),
        ((150,), r"One stretch of 101 tokens is too little for a verdict"),
        ((), r"No text is as long as the target: 0 texts"),
    ],
)
def test_too_little_text_is_said(tokens: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidParameterError, match=says):
        split_texts([document(str(length), length) for length in tokens], tokens=101, seed=0)


def test_a_budget_is_time_or_passes() -> None:
    assert parse_budget("30min").seconds == 1800
    assert (parse_budget("1.5h").seconds, parse_budget("90 s").seconds) == (5400, 90)
    assert (parse_budget("25 passes").passes, parse_budget(None).passes) == (25, None)
    for wrong in ("30", "half an hour", "0min", "-3h", 30.0):
        with pytest.raises(InvalidParameterError, match="30min"):
            parse_budget(wrong)


def test_smaller_budgets_make_smaller_sizes_that_they_last_for() -> None:
    whole = COSTS.sizes(None)
    assert (whole.whole, whole.finalists, whole.first, whole.texts, whole.held_out, whole.keys) == (10, 3, 1, 3, 5, 3)
    costs = [COSTS.most(COSTS.sizes(allowed)) for allowed in (60.0, 50.0, 40.0, 30.0, 20.0)]
    assert all(cost <= allowed for cost, allowed in zip(costs, (60.0, 50.0, 40.0, 30.0, 20.0), strict=True))
    assert all(later <= earlier for earlier, later in pairwise(costs))
    with pytest.raises(InvalidParameterError, match=r"budget is too small: it comes to 3\.0 passes over 16,384 tokens"):
        COSTS.sizes(3.0)
    assert replace(COSTS, choosing=1, held_out=1, keys=False).sizes(None).texts == 1
    assert len(LADDER) >= 5


def test_an_hour_on_two_cores_ends_in_a_verdict_on_five_texts() -> None:
    """A hundred candidates, and the forty passes that two cores read in an hour: the choice was once judged on one."""
    costs = replace(COSTS, judged=98, others=5, choosing=3, held_out=5)
    sizes = costs.sizes(40.0)
    assert (sizes.held_out, costs.most(sizes) <= 40) == (5, True)
    assert sizes.whole >= 3, "and still chooses among more than the published YaRN"
    assert costs.sizes(32.0).held_out == 3


def test_short_targets_take_more_texts() -> None:
    short, long = replace(COSTS, trained=128, length=512), replace(COSTS, length=65536)
    assert (COSTS.stretches, short.stretches) == (1, 11)
    assert (COSTS.prefix, long.prefix) == (4096, 8192)


@pytest.mark.parametrize("turning_point", [1, 1600, 40_000])
def test_the_clock_says_what_attention_costs(turning_point: int) -> None:
    """Two timed passes; on CPUs without matrix units a pass over 16K tokens took a fifth more than operations say."""

    def seconds(tokens: int) -> float:
        return 1e-3 * tokens + 1e-3 * tokens**2 / turning_point

    timed = COSTS.timed(seconds(4096), seconds(16384))
    assert timed.turning_point == turning_point
    assert timed.of(8192) == pytest.approx(seconds(8192) / seconds(16384))
    assert replace(timed, turning_point=COSTS.turning_point) == COSTS


@pytest.mark.parametrize(("share", "eighth"), [(0.01, 1 / 64), (0.25, 1 / 8), (0.9, 1 / 8)])
def test_a_clock_that_says_more_than_all_or_nothing(share: float, eighth: float) -> None:
    """Attention is at most all of a pass, at least nothing; a tiny model's calls cost something beside both."""
    assert COSTS.timed(share, 1.0).of(2048) == pytest.approx(eighth, rel=1e-2)
