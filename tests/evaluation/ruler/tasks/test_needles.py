"""Needles beside those of NVIDIA's own generator: the same checks pass on both, and the same skeleton is left."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from ctxext.evaluation.ruler.tasks import TASKS
from ctxext.evaluation.ruler.tasks.base import Question
from tests.evaluation.ruler._nvidia import CASES, task_for

NEEDLES = [name for name in TASKS if name.startswith("niah")]
HEX = "[0-9a-f]"
UUID = f"{HEX}{{8}}-{HEX}{{4}}-4{HEX}{{3}}-[89ab]{HEX}{{3}}-{HEX}{{12}}"
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (\S+)\.")


def both(name: str) -> Iterator[tuple[str, Question]]:
    """NVIDIA's prompts of a task, and ours of the same sizes."""
    for case in (case for case in CASES if case["task"] == name):
        theirs = Question(case["prompt"], tuple(case["answers"]))
        task = task_for(name, case.get("length", 4096))
        for seed in range(3):
            ours = task.question(case["size"], random.Random(seed))
            yield theirs.prompt, ours
            yield theirs.prompt, theirs


def skeleton(prompt: str) -> str:
    """What is left of a needle prompt when keys and values are masked."""
    masked = NEEDLE.sub(r"One of the special magic \1 for KEY is: VALUE.", prompt)
    masked = re.sub(r"(magic \w+ for ).+?( mentioned)", r"\1QUERY\2", masked)
    return re.sub(r" +", " ", masked)


@pytest.mark.parametrize("name", NEEDLES)
def test_needles(name: str) -> None:
    several = {"niah_multikey_1": (4, 1, 1), "niah_multivalue": (1, 4, 1), "niah_multiquery": (4, 1, 4)}
    keys, values, queries = several.get(name, (1, 1, 1))
    kind = UUID if name in ("niah_single_3", "niah_multikey_3") else r"[1-9]\d{6}"
    filler = {"niah_multikey_2": 9, "niah_multikey_3": 9}.get(name, 0)
    checked = 0
    for reference, made in both(name):
        found = [match.groups() for match in NEEDLE.finditer(made.prompt)]
        assert len(found) == keys * values + filler
        assert all(re.fullmatch(kind, value) for _, _, value in found)
        by_key: dict[str, list[str]] = {}
        for _, key, value in found:
            by_key.setdefault(key, []).append(value)
        if name == "niah_multikey_3":
            assert all(re.fullmatch(UUID, key) for key in by_key)
        asks = re.search(r"\nWhat .* magic \w+ for (.+) mentioned in the provided text\?", made.prompt)
        asked = re.split(r", and |, ", asks[1])
        assert len(asked) == queries
        # The values of one key stand in any order, those of several keys in the order asked.
        assert Counter(made.answers) == Counter(value for key in asked for value in by_key[key])
        if queries > 1:
            assert list(made.answers) == [by_key[key][0] for key in asked]
        if name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3"):
            assert Counter(skeleton(made.prompt).split("\n")) == Counter(skeleton(reference).split("\n"))
        else:
            # The same words of the same text, the needles between its sentences.
            needle = r" *One of the special magic \w+ for KEY is: VALUE\. *"
            bare = [re.sub(needle, " ", skeleton(text)) for text in (made.prompt, reference)]
            bare = [re.sub(" ?\n ?", "\n", text) for text in bare]
            assert bare[0] == bare[1]
        checked += 1
    assert checked == 12


def test_needle_in_noise_stands_anywhere_but_last() -> None:
    task = task_for("niah_single_1")
    places = Counter()  # type: ignore[var-annotated]
    for seed in range(400):
        lines = task.question(8, random.Random(seed)).prompt.split("\n")[1:-1]
        places[next(index for index, line in enumerate(lines) if line.startswith("One"))] += 1
    assert set(places) == set(range(8))
    assert max(places.values()) < 2 * min(places.values())


@pytest.mark.slow
def test_needle_in_prose_stands_at_forty_depths() -> None:
    """Sentence counts from numpy's own forty depths; the text repeats when it is too short."""
    task = task_for("niah_single_2")
    words = 5 * 6 * 30  # five times the text of thirty sentences of six words
    allowed = {int(150 * depth / 100) for depth in np.round(np.linspace(0, 100, 40))}
    seen = set()
    for seed in range(400):
        context = task.question(words, random.Random(seed)).prompt.split("\n")[1]
        before, after = NEEDLE.split(context)[0], NEEDLE.split(context)[-1]
        assert before.count(".") + after.count(".") == 150
        seen.add(before.count("."))
    assert seen == allowed
