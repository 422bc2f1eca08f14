"""Questions as tasks of lm-evaluation-harness, so that others can ask them of any model that it knows.

Each task is a YAML file and a JSONL file of its length and seed; one short Python file beside them opens the latter
wherever the folder lies. The harness compares the answers' likelihoods as they are, not each with its own mean over the
questions of a text, so that its accuracies are other ones. Tested with lm-evaluation-harness 0.4.13.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctxext.errors import ResultsError
from ctxext.evaluation.retrieval.choices import ChoicePrompt
from ctxext.files import write_whole
from ctxext.version import __version__

LOADER = "ctxext_questions"
PROGRAM = '''"""Opens the questions that lie beside this file, for lm-evaluation-harness."""

from pathlib import Path

import datasets


def questions(*, file, **_):
    """Return the questions of one task as its test set."""
    path = Path(__file__).with_name(file)
    return {"test": datasets.load_dataset("json", data_files=str(path), split="train")}
'''
TASK = """task: {task}
tag: ctxext_retrieval
custom_dataset: !function {loader}.questions
dataset_kwargs:
  file: {file}
test_split: test
output_type: multiple_choice
doc_to_text: prompt
doc_to_choice: choices
doc_to_target: gold
target_delimiter: " "
num_fewshot: 0
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
  length: {length}
  seed: {seed}
  ctxext: {version}
"""


def write_tasks(folder: Path, prompts: Sequence[ChoicePrompt], tokenizer: Any, *, seed: int) -> list[str]:
    """Write a task for every kind of question and length, and return their names.

    The prompts are written as text, without the special tokens in front, which the harness adds itself. It reads them
    again as tokens: their number may then differ by a few, since one sentence is cut.
    The folder is made where it is not there.

    Raises:
        ResultsError: the folder cannot be written.
    """
    prompts_of: dict[tuple[str, int], list[ChoicePrompt]] = {}
    for prompt in prompts:
        prompts_of.setdefault((prompt.task, prompt.length), []).append(prompt)
    names = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{LOADER}.py", PROGRAM)
        for (task, length), asked in prompts_of.items():
            names.append(f"ctxext_{task}_{length}_seed{seed}")
            lines = [json.dumps(line) for prompt in asked for line in _lines(prompt, tokenizer)]
            write_whole(folder / f"{names[-1]}.jsonl", "\n".join([*lines, ""]))
            task_file = TASK.format(
                task=names[-1],
                loader=LOADER,
                file=f"{names[-1]}.jsonl",
                length=length,
                seed=seed,
                version=__version__,
            )
            write_whole(folder / f"{names[-1]}.yaml", task_file)
    except OSError as error:
        raise ResultsError(f"Cannot write tasks to {str(folder)!r}: {error.strerror}. Give another folder.") from error
    return names


def _lines(prompt: ChoicePrompt, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the questions about one text, each as a whole prompt."""
    text = prompt.text[prompt.prefix :].tolist()
    return [
        {
            "prompt": tokenizer.decode([*text, *request.tolist()]),
            "choices": list(prompt.questions.answers),
            "gold": gold,
            "text": prompt.index,
        }
        for gold, request in enumerate(prompt.requests)
    ]
