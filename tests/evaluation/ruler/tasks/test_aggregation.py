"""Lists of words beside those of NVIDIA's own generator."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from ctxext.evaluation.ruler.tasks.base import Question
from tests.evaluation.ruler._nvidia import CASES, task_for


@pytest.mark.parametrize(("length", "repeats"), [(2048, ((3, 1), (6, 1))), (4096, ((10, 3), (30, 3)))])
def test_common_words(length: int, repeats: tuple[tuple[int, int], ...]) -> None:
    reference = next(case for case in CASES if case["task"] == "cwe" and case["length"] == length)
    task = task_for("cwe", length)
    ours = [task.question(25, random.Random(seed)) for seed in range(3)]
    frames = set()
    for made in [*ours, Question(reference["prompt"], tuple(reference["answers"]))]:
        lines = made.prompt.split("\n")
        assert len(lines) == 6
        answer = re.search(r"in the list are: (1\. .*)", lines[2])
        for line, (common, other), expected, words in (
            (lines[1], repeats[0], set(_entries(answer[1])), 20 if length == 2048 else 40),
            (lines[4], repeats[1], set(made.answers), 25),
        ):
            counts = Counter(_entries(line))
            assert len(expected) == 10
            assert {word for word, times in counts.items() if times == common} == expected
            assert len(counts) == words
            assert {times for word, times in counts.items() if word not in expected} == {other}
        frames.add((lines[0], lines[2].replace(answer[1], ""), lines[3], lines[5]))
    assert len(frames) == 1


def _entries(line: str) -> list[str]:
    parts = re.split(r"(?:^| )(\d+)\. ", line)[1:]
    numbers, words = parts[::2], parts[1::2]
    assert [int(number) for number in numbers] == list(range(1, len(words) + 1))
    return words


def test_frequent_words() -> None:
    for case in (case for case in CASES if case["task"] == "fwe"):
        task = task_for("fwe", case["length"])
        made = task.question(case["size"], random.Random(1))
        counts, frames = [], []
        for prompt, answers in ((made.prompt, made.answers), (case["prompt"], case["answers"])):
            text = re.search(r"coded words\. (.*)\nQuestion", prompt)
            found = Counter(text[1].split(" ")).most_common()
            assert [word for word, _ in found[:4]] == ["...", *answers]
            assert all(re.fullmatch("[a-z]{6}", word) for word, _ in found[1:])
            counts.append([times for _, times in found])
            frames.append(prompt.replace(text[1], ""))
        assert counts[0] == counts[1]
        zeta = sum(1 / rank**2 for rank in range(1, 200_000))
        assert counts[0][:4] == [int(case["size"] / rank**2 / zeta) for rank in range(1, 5)]
        assert frames[0] == frames[1]
