"""What a layout says, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from ctxext.errors import InvalidParameterError
from ctxext.kernels import Layout
from ctxext.kernels.layout import Span
from tests.kernels.cases import LAYOUTS, Largest

KEEP = torch.tensor([[False, True, True, True], [True, True, False, False]])


@pytest.mark.parametrize("name", LAYOUTS)
def test_spans_say_the_same_as_the_rule(name: str) -> None:
    """Blocks of plain causal attention, drawn by hand, are the mask that positions and documents give."""
    layout = LAYOUTS[name]()
    if layout.spans is None:
        assert name.endswith("permuted")
        return
    drawn = torch.zeros(layout.batch, layout.query_length, layout.key_length, dtype=torch.bool)
    for rows, query, key in layout.spans:
        block = torch.ones(query[1] - query[0], key[1] - key[0], dtype=torch.bool)
        if layout.sees == "past":
            block = block.tril((key[1] - key[0]) - (query[1] - query[0]))
        drawn[slice(*rows), slice(*query), slice(*key)] = block
    assert torch.equal(drawn, layout.visible())


def test_constructors_agree_with_of() -> None:
    batch = Layout.packed([5, 3, 4], queries=[1, 3, 2])
    for built in (Layout.causal(2, 3, 5), Layout.packed([2, 3]), batch, Layout.cached(2, 2, 6, filled=4)):
        again = Layout.of(built.query_positions, built.key_positions, built.query_documents, built.key_documents)
        assert (again.spans, again.consecutive) == (built.spans, built.consecutive)


def test_a_continuous_batch_may_hold_the_newest_keys_of_each_document() -> None:
    layout = Layout.packed([5, 3], queries=[1, 2], keys=[2, 3])
    assert layout.query_positions.tolist() == [[4, 1, 2]]
    assert layout.key_positions.tolist() == [[3, 4, 0, 1, 2]]
    assert layout.spans == (Span((0, 1), (0, 1), (0, 2)), Span((0, 1), (1, 3), (2, 5)))
    assert layout.from_zero is False
    assert Layout.packed([5, 3], queries=[1, 2]).from_zero is True


def test_padding_starts_at_position_zero() -> None:
    layout = Layout.padded(KEEP)
    assert layout.key_positions.tolist() == [[0, 0, 1, 2], [0, 1, 1, 1]]
    assert layout.spans == (Span((0, 1), (1, 4), (1, 4)), Span((1, 2), (0, 2), (0, 2)))
    assert not layout.whole


def test_full_rows_are_one_span() -> None:
    assert Layout.padded(torch.ones(3, 4, dtype=torch.bool)).whole


def test_a_window_hides_the_far() -> None:
    assert Layout.causal(1, 4).visible(2)[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 1, 9, 500])
@pytest.mark.parametrize("name", LAYOUTS)
def test_visible_pairs_take_a_byte_each(name: str, window: int | None) -> None:
    """And are those within the window, by their distance."""
    layout = LAYOUTS[name]()
    with Largest() as largest:
        seen = layout.visible(window)
    assert largest.bytes <= max(seen.numel(), 8 * layout.key_positions.numel())
    distance = layout.distances()
    queries, keys = (torch.zeros(1, 1) if x is None else x for x in (layout.query_documents, layout.key_documents))
    same = (queries[:, :, None] == keys[:, None]) & (keys[:, None] >= 0)
    assert torch.equal(seen, same & (distance >= 0) & (distance < (window or 10**6)))


def test_unanalysed_layouts_see_the_same() -> None:
    assert torch.equal(Layout.padded(KEEP, analyse=False).visible(), Layout.padded(KEEP).visible())
    assert Layout.padded(KEEP, analyse=False).spans is None


def test_memo_forgets_when_its_owner_changes() -> None:
    layout, owner = Layout.causal(1, 4), torch.ones(2)
    first = layout.memo("sum", lambda: owner.sum(), owner=owner)
    assert layout.memo("sum", lambda: owner.sum(), owner=owner) is first
    owner.add_(1)
    assert layout.memo("sum", lambda: owner.sum(), owner=owner) == 4
    assert layout.memo("sum", lambda: torch.tensor(7.0), owner=torch.ones(2)) == 7


POSITIONS = torch.arange(4)[None]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Layout.of(POSITIONS - 1, POSITIONS), "query position -1 in row 0 is negative"),
        (lambda: Layout.of(POSITIONS, torch.tensor([[0, 1, 1, 2]])), "key position 1 occurs twice in document 0"),
        (
            lambda: Layout.of(POSITIONS.float(), POSITIONS),
            "query_positions must be a tensor of signed integers, found torch.float32",
        ),
        (
            lambda: Layout.of(POSITIONS, POSITIONS > 1),
            "key_positions must be a tensor of signed integers, found torch.bool",
        ),
        (lambda: Layout.of(POSITIONS, POSITIONS.to(torch.uint8)), "signed integers, found torch.uint8"),
        (lambda: Layout.of(POSITIONS[0], POSITIONS), "query_positions must be \\[batch, query\\]"),
        (lambda: Layout.of(POSITIONS, POSITIONS.expand(2, 4)), "key_positions must be \\[batch, key\\]"),
        (lambda: Layout.of(POSITIONS, POSITIONS, POSITIONS), "for both queries and keys, or for neither"),
        (lambda: Layout.of(POSITIONS, POSITIONS, POSITIONS[:, :2], POSITIONS), "query_documents must be"),
        (lambda: Layout.padded(torch.tensor([[True, False, True]])), "keep has a hole in row 0"),
        (lambda: Layout.padded(torch.zeros(1, 4)), "A float mask is a bias"),
        (lambda: Layout.padded(KEEP, query=5), "query must be between 1 and the number of keys 4, found 5"),
        (lambda: Layout.packed([3, 0]), "at least one positive integer each"),
        (lambda: Layout.packed([]), "at least one positive integer each"),
        (lambda: Layout.packed([3], keys=[5]), r"found \[3\], \[5\], \[3\]"),
        (lambda: Layout.packed([3], queries=[3], keys=[2]), r"found \[3\], \[2\], \[3\]"),
        (lambda: Layout.packed([3, 2], queries=[0, 1]), "0 < queries"),
        (lambda: Layout.packed([3, 2], queries=[1]), "0 < queries"),
        (lambda: Layout.causal(1, 5, 4), "found 4 for 5"),
        (lambda: Layout.cached(1, 2, 8, filled=9), "found 2, 9, 8"),
        (lambda: Layout.shard(POSITIONS).visible(), "its engine decides"),
        (lambda: Layout.shard(POSITIONS).both_ways, "engine makes it causal"),
        (lambda: Layout.causal(1, 2, 5).mirrored, "no cache and no shard"),
    ],
)
def test_refuses(call, match: str) -> None:
    with pytest.raises(InvalidParameterError, match=match):
        call()


def test_padding_of_queries_alone_moves_no_key_of_a_mirrored_layout() -> None:
    layout = Layout.of(POSITIONS, POSITIONS, torch.tensor([[0, -1, 0, 0]]), torch.zeros_like(POSITIONS))
    later = (POSITIONS[0, :, None] <= POSITIONS) & torch.tensor([[True], [False], [True], [True]])
    assert torch.equal(layout.mirrored.visible()[0].flip(0, 1), later)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_narrow_positions_are_positions(dtype: torch.dtype) -> None:
    order = torch.tensor([[0, 2, 1, 3, 127]])
    narrow, wide = (Layout.of(at, at, at * 0 + 100, at * 0 + 100) for at in (order.to(dtype), order))
    assert torch.equal(narrow.both_ways.visible(), wide.both_ways.visible())
    assert torch.equal(narrow.places(), wide.places())


def test_the_same_position_in_two_documents_is_fine() -> None:
    documents = torch.tensor([[0, 1, 0, 1]])
    places = torch.tensor([[0, 0, 1, 1]])
    layout = Layout.of(places, places, documents, documents)
    assert layout.spans is None
    assert layout.visible()[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    "name", ["causal", "left padded", "right padded", "packed", "an empty row", "skipping positions"]
)
def test_the_past_of_a_mirrored_layout_is_the_future(name: str) -> None:
    """Read from its end, a token sees itself and what comes after it, at the same distances, in as plain blocks."""
    layout = LAYOUTS[name]()
    mirrored = layout.mirrored
    seen, around = mirrored.visible().flip(1, 2), layout.both_ways.visible()
    assert torch.equal(seen, around & (layout.distances() <= 0))
    assert torch.equal(mirrored.distances().flip(1, 2)[seen], -layout.distances()[seen])
    documents = (mirrored.query_documents, mirrored.key_documents)
    again = Layout.of(mirrored.query_positions, mirrored.key_positions, *documents)
    assert sorted(mirrored.spans or ()) == sorted(again.spans or ())
    assert mirrored.consecutive == layout.consecutive
