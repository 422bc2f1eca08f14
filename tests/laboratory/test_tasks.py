"""Every task's labels against a definition written out symbol by symbol, and how a text is split."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ctxext.errors import InvalidParameterError
from ctxext.laboratory.tasks import ANSWER, BEGIN, NOT_ASKED, TASKS, byte_text
from ctxext.texts.documents import Document

Answers = list[int]


def parity(read: list[int]) -> Answers:
    return [read[: place + 1].count(1) % 2 for place in range(len(read))]


def permutations_by_matrices(read: list[int]) -> Answers:
    """A permutation as a matrix of zeros and ones, the product from the left."""
    group = list(itertools.permutations(range(3)))
    matrices = [torch.tensor([[float(one[column] == row) for column in range(3)] for row in range(3)]) for one in group]
    product, answers = torch.eye(3), []
    for symbol in read:
        product = matrices[symbol] @ product
        answers.append(next(place for place, one in enumerate(matrices) if torch.equal(one, product)))
    return answers


def memory(read: list[int]) -> Answers:
    stored, answers = None, []
    for what, bit in zip(read[::2], read[1::2], strict=True):
        stored = bit if what == 3 else stored
        assert {what} <= {2, 3, 4}
        assert {bit} <= {0, 1}
        assert what != 4 or bit == stored, "what is read from the memory stands in the text, too"
        answers += [stored if what == 4 else NOT_ASKED, NOT_ASKED]
    return answers


def rewritten(rule: Callable[[list[int]], list[int]]) -> Callable[[list[int]], Answers]:
    def answers(read: list[int]) -> Answers:
        mark = read.index(ANSWER)
        letters, said = read[1:mark], read[mark + 1 :]
        assert read[0] == BEGIN
        assert said == rule(letters)[:-1], "the answer so far is read, too"
        return [NOT_ASKED] * mark + rule(letters)

    return answers


DEFINITIONS: dict[str, Callable[[list[int]], Answers]] = {
    "parity": parity,
    "s3": permutations_by_matrices,
    "flipflop": memory,
    "copy": rewritten(list),
    "reverse": rewritten(lambda letters: letters[::-1]),
    "order": rewritten(sorted),
}


def drawn(name: str, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return TASKS[name].example(length, 16, torch.Generator().manual_seed(seed))


def test_every_task_has_a_definition() -> None:
    assert DEFINITIONS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_the_labels_are_the_definition(name: str) -> None:
    task = TASKS[name]
    for length in (4, task.trained, 2 * task.trained):
        tokens, labels = drawn(name, length)
        assert tokens.shape == labels.shape == (16, task.tokens(length))
        assert set(tokens.flatten().tolist()) <= set(range(task.vocabulary))
        assert [DEFINITIONS[name](row) for row in tokens.tolist()] == labels.tolist()
        assert bool((labels != NOT_ASKED).any(1).all()), "every puzzle asks something"


@pytest.mark.parametrize("name", TASKS)
def test_what_is_drawn_depends_on_the_seed_alone(name: str) -> None:
    length = TASKS[name].trained
    assert torch.equal(drawn(name, length)[0], drawn(name, length)[0])
    assert not torch.equal(drawn(name, length)[0], drawn(name, length, seed=1)[0])


@pytest.mark.parametrize("name", TASKS)
def test_training_stays_within_the_trained_length(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = {TASKS[name].drawn_length(generator) for _ in range(2000)}
    assert max(lengths) == TASKS[name].trained
    assert min(lengths) == (TASKS[name].trained if name == "flipflop" else 1)
    assert TASKS[name].lengths()[-1] == 8 * TASKS[name].trained


def test_chance_is_what_guessing_gets() -> None:
    for name, task in TASKS.items():
        _, labels = task.example(task.trained, 4000, torch.Generator().manual_seed(0))
        asked = labels[labels != NOT_ASKED]
        guessed = torch.randint(0, round(1 / task.chance), asked.shape, generator=torch.Generator().manual_seed(1))
        assert (guessed == asked).double().mean().item() == pytest.approx(task.chance, abs=0.01), name


def documents(count: int, size: int = 500) -> list[Document]:
    return [Document(f"play {place}", chr(ord("a") + place) * size) for place in range(count)]


def test_every_fifth_document_is_tested_on_and_never_learned_from() -> None:
    text = byte_text(documents(11), length=100, windows=6)
    assert {bytes([window[0]]) for window in text.windows} == {b"e", b"j"}
    assert set(b"".join(text.windows)).isdisjoint(text.training)
    assert [len(window) for window in text.windows] == [101] * 6


def test_of_a_single_document_the_end_is_tested_on() -> None:
    whole = "".join(f"line {place}\n" for place in range(200))
    text = byte_text([Document("one", whole)], length=50, windows=4)
    assert whole.encode().startswith(text.training)
    assert all(window in whole.encode()[len(text.training) :] for window in text.windows)


def test_bytes_are_predicted_from_those_before() -> None:
    text = byte_text(documents(5), length=100, windows=2)
    tokens, labels = text.drawn(20, 3, torch.Generator().manual_seed(0))
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert tokens.shape == (3, 20)


def test_too_little_text_says_what_is_needed() -> None:
    with pytest.raises(InvalidParameterError, match=r"2,500 bytes, .* 4 windows of 101 bytes, and 5 are needed. Give"):
        byte_text(documents(5), length=100, windows=5)
