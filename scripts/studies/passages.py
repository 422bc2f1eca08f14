"""Find the one long document that says what is asked: an embedding model with a longer table, beside windows.

    python scripts/studies/passages.py all-MiniLM-L6-v2 -m tile -m pi -f 4 -l 1024 -l 2048 -w 512 -w 128 -n 60 --seeds 3
    python scripts/studies/passages.py all-MiniLM-L6-v2 -m tile -m pi -f 4 -l 512 -l 2048 -n 40 --of sentences

Of ``paragraphs``: every document is a stretch of another play, with one paragraph of the documentation of Python's
standard library somewhere in it; a query is the first sentence of that documentation, which the document lacks. Of
``sentences``: all documents are the same noise with one sentence in it that gives a person's pass key; a query asks for
one person's key. The document nearest to a query should be its own.

The unextended model reads the first tokens of its window, or all windows, of which the embeddings are averaged or the
nearest one counts. Each method reads the whole document at once.

Source of the sentences' task: Zhu et al., arXiv:2404.12096, section 3, which MTEB has as LEMBPasskeyRetrieval; the
wording and the other task are our own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pkgutil
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import functional
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

import ctxext
from ctxext.cli.options import run_script
from ctxext.core.architecture import trained_length_of
from ctxext.core.subject import Subject
from ctxext.measuring.statistics import grouped_difference
from ctxext.texts.documents import read_documents
from ctxext.texts.haystack import Haystack, nearest_boundary, noise, of_text, split_sentences
from scripts.bench import machine, markdown_table

MARGIN = 4
"""Tokens by which a text may grow when it is written out and read again."""

FIRST = ("Alma", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis")
LAST = ("Adler", "Baker", "Carver", "Fisher", "Glover", "Hunter", "Miller", "Porter", "Sawyer", "Tanner", "Weaver")
SENTENCE = " The pass key of {name} is {key}. Remember that {key} is the pass key of {name}."
QUERY = "What is the pass key of {name}?"
TITLE, PARAGRAPH = range(5, 21), range(40, 111)  # words of documentation


def sentences(generator: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw people: a question for the pass key of each, and the sentence that tells it."""
    names = [f"{first} {last}" for first, last in itertools.product(FIRST, LAST)]
    generator.shuffle(names)
    keys = [generator.randrange(10_000, 100_000) for _ in names]
    told = zip(names, keys, strict=True)
    return [(QUERY.format(name=name), SENTENCE.format(name=name, key=key)) for name, key in told][:count]


@functools.cache
def documented() -> dict[str, str]:
    """Return what Python's standard library says of itself: by each first sentence, the paragraphs behind it."""
    found = dict[str, str]()
    for module in sorted(module.name for module in pkgutil.iter_modules() if module.name in sys.stdlib_module_names):
        if module.startswith(("_", "turtle", "antigravity", "this", "idlelib", "test", "lib2to3")):
            continue
        with warnings.catch_warnings(action="ignore"):
            loaded = importlib.import_module(module)
        for name, value in sorted(vars(loaded).items()):
            if name.startswith("_") or getattr(value, "__module__", None) != module:
                continue
            title, _, rest = (inspect.getdoc(value) or "").partition("\n\n")
            rest = " ".join(rest.partition(">>>")[0].split())
            if len(title.split()) in TITLE and len(rest.split()) in PARAGRAPH:
                found.setdefault(" ".join(title.split()), f" {rest}")
    return found


def paragraphs(generator: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw first sentences of documentation, and the paragraphs behind each."""
    return generator.sample(sorted(documented().items()), count)


@functools.cache
def plays(tokenizer: Any) -> list[Haystack]:
    """Return the installed plays as haystacks."""
    return [of_text(tokenizer, document.name, document.text) for document in read_documents()]


def shelf(tokenizer: Any, of: str, length: int, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return documents of a length, what they tell at depths that are spread evenly, and a query for each."""
    generator = random.Random(f"passages {of} {seed} {length} {count}")
    drawn, haystacks = (sentences, [noise(tokenizer)]) if of == "sentences" else (paragraphs, plays(tokenizer))
    told = drawn(generator, count)
    depths = [place / (count - 1) for place in range(count)]
    generator.shuffle(depths)
    around = itertools.cycle(generator.sample(haystacks, len(haystacks)))
    texts = [
        document(tokenizer, haystack, length, depth, passage, generator)
        for haystack, depth, (_, passage) in zip(around, depths, told, strict=False)
    ]
    return texts, [query for query, _ in told]


def document(
    tokenizer: Any, haystack: Haystack, length: int, depth: float, passage: str, generator: random.Random
) -> str:
    """Write one document around a passage."""
    taken = len(tokenizer(passage, add_special_tokens=False).input_ids) + tokenizer.num_special_tokens_to_add()
    around = haystack.take(length - taken - MARGIN, generator)
    place = nearest_boundary(around, depth)
    head, tail = (tokenizer.decode([*itertools.chain(*part)]) for part in (around[:place], around[place:]))
    return f"{head}{passage} {tail}".strip()


def chunks(tokenizer: Any, text: str, window: int) -> list[str]:
    """Cut a text between sentences into few pieces of about equal length that a window holds."""
    room = window - tokenizer.num_special_tokens_to_add() - MARGIN
    sentences = [tokenizer(piece, add_special_tokens=False).input_ids for piece in split_sentences(text)]
    parts = [piece[at : at + room] for piece in sentences for at in range(0, len(piece), room)]
    whole = sum(map(len, parts))
    target = whole / -(-whole // room)
    pieces: list[list[int]] = [[]]
    for part in parts:
        if pieces[-1] and (len(pieces[-1]) >= target or len(pieces[-1]) + len(part) > room):
            pieces.append([])
        pieces[-1] += part
    return [tokenizer.decode(piece) for piece in pieces]


def embed(encoder: SentenceTransformer, texts: Sequence[str], tokens: int) -> Tensor:
    """Return unit vectors, one text at a time, so that no padding decides the kernel that computes it."""
    encoder.max_seq_length = tokens
    vectors = encoder.encode(list(texts), batch_size=1, convert_to_tensor=True, show_progress_bar=False)
    return functional.normalize(vectors.float().cpu(), dim=-1)


def is_nearest(scores: Tensor) -> list[float]:
    """Return 1 for each query that is nearest to its own document alone, by queries and documents; a tie is lost."""
    return ((scores >= scores.diagonal()[:, None]).sum(dim=1) == 1).float().tolist()


def found_at(
    encoder: SentenceTransformer, shelved: tuple[list[str], list[str]], table: int, windows: Sequence[int]
) -> dict[str, list[float]]:
    """Return the queries that the unextended model answers, in its simple ways."""
    texts, asked = shelved
    queries = embed(encoder, asked, table)
    found = {f"first {table:,} tokens": is_nearest(queries @ embed(encoder, texts, table).T)}
    for window in windows:
        pieces = [embed(encoder, chunks(encoder.tokenizer, text, window), window) for text in texts]
        averages = torch.stack([functional.normalize(each.mean(dim=0), dim=-1) for each in pieces])
        nearest = torch.stack([(queries @ each.T).amax(dim=1) for each in pieces], dim=1)
        found[f"windows of {window:,}, averaged"] = is_nearest(queries @ averages.T)
        found[f"windows of {window:,}, nearest (a vector each)"] = is_nearest(nearest)
    return found


def joined(parts: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the answers of all seeds to each name, one after the other."""
    return {name: [right for part in parts for right in part[name]] for name in parts[0]}


def main(
    model: Annotated[str, Argument(help="An embedding model of sentence-transformers with a table of positions.")],
    method: Annotated[list[str], Option("--method", "-m", help="Repeatable.")],
    length: Annotated[list[int], Option("--length", "-l", help="Tokens of each document. Repeatable.")],
    factor: Annotated[float, Option("--factor", "-f", help="Target length / trained length.")] = 4.0,
    documents: Annotated[int, Option("--documents", "-n", min=2, max=len(FIRST) * len(LAST))] = 60,
    window: Annotated[list[int] | None, Option("--window", "-w", help="Tokens of the windows. Repeatable.")] = None,
    of: Literal["paragraphs", "sentences"] = "paragraphs",
    seeds: int = 1,
) -> None:
    """Print the share of documents found by each way to read, and each method's difference to the best simple way."""
    encoder = SentenceTransformer(model, device="cpu")
    table = trained_length_of(Subject.of(encoder[0].auto_model))  # MPNet's config counts two rows of padding too
    if table is None:
        sys.exit(f"The config of {model} states no table of positions.")
    shelves = [[shelf(encoder.tokenizer, of, tokens, documents, seed) for seed in range(seeds)] for tokens in length]
    simple = [joined([found_at(encoder, each, table, window or [table]) for each in same]) for same in shelves]
    found = {name: [each[name] for each in simple] for name in simple[-1]}
    for name in method:
        ctxext.patch(encoder, name, factor=factor)
        found[f"{name} x{factor:g}"] = [
            [
                right
                for texts, asked in same
                for right in is_nearest(embed(encoder, asked, table) @ embed(encoder, texts, tokens).T)
            ]
            for tokens, same in zip(length, shelves, strict=True)
        ]
        ctxext.unpatch(encoder)
    best = max(
        (found[name][-1] for name in simple[-1] if "averaged" in name or "first" in name), key=sum
    )  # of one vector
    rows = []
    for name, at_lengths in found.items():
        shares = [f"{sum(right) / len(right):.0%}" for right in at_lengths]
        gap = grouped_difference(*torch.tensor([at_lengths[-1], best]).float()[..., None], over="queries")
        rows.append([name, *shares, f"{100 * gap.mean:+.0f} ± {100 * gap.standard_error:.0f}"])
    title = f"Documents found by {Path(model).name}, {seeds} times {documents} of each length; {machine('cpu')}"
    header = ["read by", *(f"{tokens:,}" for tokens in length), "minus the best simple way with one vector, points"]
    print(markdown_table(title, header, rows))


if __name__ == "__main__":
    run_script(main)
