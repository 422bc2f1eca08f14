"""Our prompts beside those of NVIDIA's own generator: the same checks pass on both, and the same skeleton is left."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.evaluation.ruler.tasks import TASKS, choose
from ctxext.evaluation.ruler.tasks.base import Question, Setting, Task, all_of
from ctxext.texts.documents import Document

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "nvidia.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]
NEEDLES = [name for name in TASKS if name.startswith("niah")]
HEX = "[0-9a-f]"
UUID = f"{HEX}{{8}}-{HEX}{{4}}-4{HEX}{{3}}-[89ab]{HEX}{{3}}-{HEX}{{12}}"
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (\S+)\.")


def count(text: str) -> int:
    """Tokens that are words, as in the golden file."""
    return len(text.split())


ESSAY = Document("numbered sentences", GOLDEN["data"]["essay"])


def task_for(name: str, length: int = 4096) -> Task:
    return TASKS[name](Setting(length, count, ESSAY))


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


def test_all_tasks_of_the_benchmark_are_there() -> None:
    assert sorted(TASKS) == sorted({case["task"] for case in CASES})
    assert len(TASKS) == 11
    family = {"niah": "niah", "vt": "variable_tracking"}
    family |= {"cwe": "common_words_extraction", "fwe": "freq_words_extraction"}
    for name, task in TASKS.items():
        assert task.tokens_to_generate == GOLDEN["tokens_to_generate"][family[name.split("_")[0]]]


@pytest.mark.parametrize("name", NEEDLES)
def test_needles(name: str) -> None:
    keys, values, queries = {
        "niah_multikey_1": (4, 1, 1),
        "niah_multivalue": (1, 4, 1),
        "niah_multiquery": (4, 1, 4),
    }.get(name, (1, 1, 1))
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
        assert asks
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
            bare = [
                re.sub(r" *One of the special magic \w+ for KEY is: VALUE\. *", " ", skeleton(text))
                for text in (made.prompt, reference)
            ]
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


def test_variable_tracking() -> None:
    reference = next(case for case in CASES if case["task"] == "vt")["prompt"]
    theirs = [case for case in CASES if case["task"] == "vt"]
    size = theirs[0]["prompt"].rpartition("Memorize")[2].count("The grass")
    task = task_for("vt")
    ours = [task.question(size, random.Random(seed)) for seed in range(5)]
    for made in [*ours, *(Question(case["prompt"], tuple(case["answers"])) for case in theirs)]:
        example, text = (part.split("\n") for part in re.split(r"(?<=\n\n)(?=Memorize)", made.prompt))
        for lines, letters in ((example, 3), (text, 5)):
            chain = [line for line in lines if line.startswith("VAR")]
            first = re.fullmatch(rf"VAR ([A-Z]{{{letters}}}) = (\d{{5}})", chain[0])
            assert first
            names = [first[1]]
            for line in chain[1:]:
                hop = re.fullmatch(rf"VAR ([A-Z]{{{letters}}}) = VAR {names[-1]} ", line)
                assert hop
                names.append(hop[1])
            assert len(set(names)) == 5
            assert f"assigned the value {first[2]} in the text above." in "\n".join(lines)
            if letters == 5:
                assert tuple(names) == made.answers
                assert lines[-1].endswith(f"5 variables are assigned the value {first[2]}, they are: ")
            else:
                assert "\n".join(lines).endswith(f"they are:  {' '.join(names)}\n\n")
        masked = [
            re.sub(r"\d{5}", "N", re.sub(r"\b[A-Z]{3}\b|\b[A-Z]{5}\b", "V", prompt))
            for prompt in (made.prompt, reference)
        ]
        assert Counter(masked[0].split("\n")) == Counter(masked[1].split("\n"))


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
        assert answer
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
            assert text
            found = Counter(text[1].split(" ")).most_common()
            assert [word for word, _ in found[:4]] == ["...", *answers]
            assert all(re.fullmatch("[a-z]{6}", word) for word, _ in found[1:])
            counts.append([times for _, times in found])
            frames.append(prompt.replace(text[1], ""))
        assert counts[0] == counts[1]
        zeta = sum(1 / rank**2 for rank in range(1, 200_000))
        assert counts[0][:4] == [int(case["size"] / rank**2 / zeta) for rank in range(1, 5)]
        assert frames[0] == frames[1]


@pytest.mark.parametrize("case", GOLDEN["scores"], ids=lambda case: repr(case["reply"]))
def test_scores_are_theirs(case: dict[str, Any]) -> None:
    assert all_of(case["reply"], case["answers"]) == case["all"]


def test_choose() -> None:
    everything = [task.name for task in choose(None, ESSAY)]
    assert everything == list(TASKS)
    without = [task.name for task in choose(None, None)]
    assert without == ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert [task.name for task in choose(["vt", "cwe"], None)] == ["vt", "cwe"]
    with pytest.raises(UnknownNameError, match="Did you mean 'niah_single_1'"):
        choose(["niah_singel_1"], ESSAY)
    with pytest.raises(InvalidParameterError, match=r"niah_single_2 cannot be measured.*long text"):
        choose(["niah_single_2"], None)
    for names in ([], ["vt", "vt"]):
        with pytest.raises(InvalidParameterError, match="each task once"):
            choose(names, ESSAY)


def test_provenance_of_the_golden_file() -> None:
    provenance = GOLDEN["provenance"]
    assert provenance["repository"] == "NVIDIA/RULER"
    assert re.fullmatch(r"[0-9a-f]{40}", provenance["commit"])
    assert list(itertools.chain(*provenance["definitions"].values())).count("generate_input_output") == 4
