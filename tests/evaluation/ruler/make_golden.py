"""Write nvidia.json: prompts and scores that NVIDIA's own RULER code makes.

    python -m tests.evaluation.ruler.make_golden path/to/RULER       # a checkout, or a bare git directory

As in scripts/make_golden.py, the pinned commit is read with git and only the named definitions are executed. What they
expect around them is given here: command line arguments, word lists, a splitter of sentences, and a tokenizer that
counts words. The essays are numbered sentences: the real ones are not ours to pass on.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import json
import logging
import math
import platform
import random
import re
import string
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import wonderwords

from scripts.make_golden import ROOT, git

COMMIT = "c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a"
DATA, EVAL = "scripts/data/synthetic", "scripts/eval"
DEFINITIONS = {
    f"{DATA}/niah.py": (
        "needle",
        "DEPTHS",
        "generate_random_number",
        "generate_random_word",
        "generate_random_uuid",
        "generate_random",
        "generate_input_output",
    ),
    f"{DATA}/variable_tracking.py": (
        "generate_chains",
        "shuffle_sublists_heap",
        "generate_input_output",
        "randomize_icl",
        "sys_vartrack_w_noise_random",
    ),
    f"{DATA}/common_words_extraction.py": ("get_example", "generate_input_output"),
    f"{DATA}/freq_words_extraction.py": ("generate_input_output",),
    f"{EVAL}/synthetic/constants.py": ("string_match_all",),
    f"{EVAL}/evaluate.py": ("postprocess_pred",),
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
SEED = 42
REPLIES = (
    ("  4821903 is the number.", ("4821903",)),
    ("It is 4821904", ("4821903",)),
    ("ABCDE and vwxyz", ("abcde", "VWXYZ", "QRSTU", "FGHIJ")),
    ("a\x00b\x1fc", ("a\nb\nc",)),
    ("", ("x", "y")),
)


class Words:
    """A tokenizer whose tokens are words."""

    def text_to_tokens(self, text: str) -> list[str]:
        return text.split()


def essay(sentences: int) -> str:
    """Numbered sentences of six words."""
    return " ".join(f"Sentence {number} is of no importance." for number in range(sentences))


def load(checkout: Path, file: str, **given: Any) -> dict[str, Any]:
    """The named definitions of one file, executed among what they expect."""
    tree = ast.parse(git(checkout, "show", f"{COMMIT}:{file}"))
    body = [node for node in tree.body if _name(node) in DEFINITIONS[file]]
    if missing := set(DEFINITIONS[file]) - {_name(node) for node in body}:
        sys.exit(f"{file} at {COMMIT[:7]} does not define {sorted(missing)}.")
    random.seed(SEED)
    np.random.seed(SEED)
    common = {"random": random, "np": np, "uuid": uuid, "string": string, "json": json, "re": re, "heapq": heapq}
    helpers = {"TOKENIZER": Words(), "tqdm": lambda items: items, "logger": logging.getLogger("RULER")}
    namespace: dict[str, Any] = common | helpers | given
    exec(compile(ast.Module(body, []), file, "exec"), namespace)
    return namespace


def _name(node: ast.stmt) -> str | None:
    """What a statement at the top of a file defines."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def niah(checkout: Path, tasks: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Two prompts of each of the eight tasks; arguments from scripts/synthetic.yaml."""
    names = {"noise": 8, "essay": 150, "needle": 9}
    for name, haystack, kind_k, kind_v, keys, values, queries in (
        ("niah_single_1", "noise", "words", "numbers", 1, 1, 1),
        ("niah_single_2", "essay", "words", "numbers", 1, 1, 1),
        ("niah_single_3", "essay", "words", "uuids", 1, 1, 1),
        ("niah_multikey_1", "essay", "words", "numbers", 4, 1, 1),
        ("niah_multikey_2", "needle", "words", "numbers", 1, 1, 1),
        ("niah_multikey_3", "needle", "uuids", "uuids", 1, 1, 1),
        ("niah_multivalue", "essay", "words", "numbers", 1, 4, 1),
        ("niah_multiquery", "essay", "words", "numbers", 4, 1, 4),
    ):
        nouns = wonderwords.random_word._get_words_from_text_file("nounlist.txt")
        adjectives = wonderwords.random_word._get_words_from_text_file("adjectivelist.txt")
        arguments = SimpleNamespace(
            num_needle_k=keys,
            num_needle_v=values,
            num_needle_q=queries,
            type_needle_k=kind_k,
            type_needle_v=kind_v,
            type_haystack=haystack,
            random_seed=SEED,
            template=tasks["niah"]["template"] + tasks["niah"]["answer_prefix"],
        )
        namespace = load(
            checkout,
            f"{DATA}/niah.py",
            args=arguments,
            haystack={"noise": NOISE, "needle": NEEDLE, "essay": essay(30).split(" ")}[haystack],
            words=[f"{adjective}-{noun}" for adjective in adjectives[:40] for noun in nouns[:40]],
            sent_tokenize=lambda text: re.split(r"(?<=\.) ", text),
        )
        for _ in range(2):
            yield case(name, names[haystack], *namespace["generate_input_output"](names[haystack]))


def vt(checkout: Path, tasks: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Two whole prompts of 800 words at most, the solved example in front."""
    template = tasks["variable_tracking"]["template"] + tasks["variable_tracking"]["answer_prefix"]
    arguments = SimpleNamespace(
        num_chains=1,
        num_hops=4,
        type_haystack="noise",
        random_seed=SEED,
        template=template,
        tokens_to_generate=30,
        model_template_token=0,
        max_seq_length=800,
        remove_newline_tab=False,
    )
    make = load(checkout, f"{DATA}/variable_tracking.py", args=arguments, haystack=NOISE, TASKS=tasks)[
        "sys_vartrack_w_noise_random"
    ]
    example = make(num_samples=1, max_seq_length=500, incremental=5)[0]
    for made in make(num_samples=2, max_seq_length=800, icl_example=example, final_output=True):
        yield case("vt", None, made["input"] + made["answer_prefix"], made["outputs"])


def cwe(checkout: Path, tasks: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One prompt below 4,096 tokens and one of that length."""
    template = tasks["common_words_extraction"]["template"] + tasks["common_words_extraction"]["answer_prefix"]
    words = wonderwords.random_word._get_words_from_text_file("verblist.txt")
    for length in (2048, 4096):
        arguments = SimpleNamespace(
            freq_cw=30, freq_ucw=3, num_cw=10, num_fewshot=1, max_seq_length=length, random_seed=SEED, template=template
        )
        make = load(checkout, f"{DATA}/common_words_extraction.py", args=arguments, words=words)[
            "generate_input_output"
        ]
        yield case("cwe", 25, *make(25)) | {"length": length}


def fwe(checkout: Path, tasks: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One prompt of 400 words and one of 1,000."""
    template = tasks["freq_words_extraction"]["template"] + tasks["freq_words_extraction"]["answer_prefix"]
    arguments = SimpleNamespace(random_seed=SEED, template=template)
    make = load(checkout, f"{DATA}/freq_words_extraction.py", args=arguments, zeta=lambda alpha: math.pi**2 / 6)
    for size in (400, 1000):
        text, answers, _ = make["generate_input_output"](10**6, num_words=size, vocab_size=40, alpha=2.0)
        yield case("fwe", size, text, answers) | {"length": 40 * 50 + 50}


def scores(checkout: Path) -> Iterator[dict[str, Any]]:
    """The metric of replies as they are cleaned before scoring."""
    metrics = load(checkout, f"{EVAL}/synthetic/constants.py")
    clean = load(checkout, f"{EVAL}/evaluate.py")["postprocess_pred"]
    for reply, answers in REPLIES:
        cleaned = [clean(reply, {})]
        found = metrics["string_match_all"](cleaned, [list(answers)])
        yield {"reply": reply, "answers": list(answers), "all": found}


def case(task: str, size: int | None, prompt: str, answers: list[str]) -> dict[str, Any]:
    """One prompt of theirs."""
    return {"task": task, "size": size, "prompt": prompt, "answers": list(answers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="checkout or bare git directory of NVIDIA/RULER")
    checkout = parser.parse_args().checkout
    target = Path(__file__).resolve().with_name("nvidia.json")
    if changes := git(ROOT, "status", "--porcelain", "--", ".", f":!{target.relative_to(ROOT)}"):
        sys.exit(f"Commit first: a golden file names the commit that made it, and this worktree has\n{changes}")
    constants: dict[str, Any] = {}
    exec(git(checkout, "show", f"{COMMIT}:{DATA}/constants.py"), constants)
    tasks = constants["TASKS"]
    made = [item for family in (niah, vt, cwe, fwe) for item in family(checkout, tasks)]
    written = {
        "provenance": {
            "repository": "NVIDIA/RULER",
            "commit": COMMIT,
            "licence": "Apache-2.0",
            "definitions": {f"{DATA}/constants.py": ["TASKS"]} | DEFINITIONS,
            "command": "python -m tests.evaluation.ruler.make_golden <checkout of NVIDIA/RULER>",
            "made_at": git(ROOT, "rev-parse", "HEAD").strip(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        },
        "data": {"essay": essay(30)},
        "tokens_to_generate": {name: task["tokens_to_generate"] for name, task in tasks.items()},
        "cases": made,
        "scores": list(scores(checkout)),
    }
    target.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"Wrote {target.relative_to(ROOT)}: {len(made)} prompts")


if __name__ == "__main__":
    main()
