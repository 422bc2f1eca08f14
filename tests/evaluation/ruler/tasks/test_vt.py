"""Chains of variables beside those of NVIDIA's own generator."""

from __future__ import annotations

import random
import re
from collections import Counter

from ctxext.evaluation.ruler.tasks.base import Question
from tests.evaluation.ruler._nvidia import CASES, task_for


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
            names = [first[1]]
            for line in chain[1:]:
                hop = re.fullmatch(rf"VAR ([A-Z]{{{letters}}}) = VAR {names[-1]} ", line)
                names.append(hop[1])
            assert len(set(names)) == 5
            assert f"assigned the value {first[2]} in the text above." in "\n".join(lines)
            if letters == 5:
                assert tuple(names) == made.answers
                assert lines[-1].endswith(f"5 variables are assigned the value {first[2]}, they are: ")
            else:
                assert "\n".join(lines).endswith(f"they are:  {' '.join(names)}\n\n")
        without = [re.sub(r"\b[A-Z]{3}\b|\b[A-Z]{5}\b", "V", prompt) for prompt in (made.prompt, reference)]
        masked = [re.sub(r"\d{5}", "N", prompt) for prompt in without]
        assert Counter(masked[0].split("\n")) == Counter(masked[1].split("\n"))
