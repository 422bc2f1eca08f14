"""Find the one long document that names a person: an embedding model with a longer table, beside windows of documents.

    python scripts/studies/passages.py all-MiniLM-L6-v2 -m tile -m pi -f 4 -l 512 -l 1024 -l 2048 -n 40

Every document of a length is the same noise with one sentence in it that gives a person's pass key; a query asks for
one person's key, and the document nearest to it should be that person's. The unextended model reads the first tokens of
its window, or all windows, of which the embeddings are averaged or the nearest one counts. Each method reads the whole
document at once.

Source of the task: Zhu et al., arXiv:2404.12096, section 3, which MTEB has as LEMBPasskeyRetrieval; the wording is our
own.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import functional
from typer import Argument, Option

sys.path.insert(0, str(Path(__file__).parents[2]))

import ctxext
from ctxext.cli.options import run_script
from ctxext.measuring.statistics import score_difference
from ctxext.texts.haystack import Haystack, nearest_boundary, noise, split_sentences
from scripts.bench import machine, markdown_table

MARGIN = 4
"""Tokens by which a text may grow when it is written out and read again."""

FIRST = ("Alma", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karin", "Louis")
LAST = ("Adler", "Baker", "Carver", "Fisher", "Glover", "Hunter", "Miller", "Porter", "Sawyer", "Tanner", "Weaver")
SENTENCE = " The pass key of {name} is {key}. Remember that {key} is the pass key of {name}."
QUERY = "What is the pass key of {name}?"


def shelf(tokenizer: Any, length: int, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return documents of a length, their sentences at depths that are spread evenly, and a query for each."""
    names = [f"{first} {last}" for first, last in itertools.product(FIRST, LAST)]
    generator = random.Random(f"passages {seed} {length} {count}")
    generator.shuffle(names)
    depths = [place / (count - 1) for place in range(count)]
    generator.shuffle(depths)
    haystack, names = noise(tokenizer), names[:count]
    texts = [
        document(tokenizer, haystack, length, depth, name, generator) for name, depth in zip(names, depths, strict=True)
    ]
    return texts, [QUERY.format(name=name) for name in names]


def document(tokenizer: Any, haystack: Haystack, length: int, depth: float, name: str, generator: random.Random) -> str:
    """Write one document around a person's sentence."""
    sentence = SENTENCE.format(name=name, key=generator.randrange(10_000, 100_000))
    taken = len(tokenizer(sentence, add_special_tokens=False).input_ids) + tokenizer.num_special_tokens_to_add()
    sentences = haystack.take(length - taken - MARGIN, generator)
    place = nearest_boundary(sentences, depth)
    parts = sentences[:place], sentences[place:]
    head, tail = (tokenizer.decode(list(itertools.chain.from_iterable(part))) for part in parts)
    return f"{head}{sentence} {tail}".strip()


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


def found_at(encoder: SentenceTransformer, shelved: tuple[list[str], list[str]], window: int) -> dict[str, list[float]]:
    """Return the queries that the unextended model answers, in its three ways."""
    texts, asked = shelved
    queries = embed(encoder, asked, window)
    pieces = [embed(encoder, chunks(encoder.tokenizer, text, window), window) for text in texts]
    averages = torch.stack([functional.normalize(each.mean(dim=0), dim=-1) for each in pieces])
    return {
        f"first {window:,} tokens": is_nearest(queries @ embed(encoder, texts, window).T),
        "windows, averaged": is_nearest(queries @ averages.T),
        "windows, nearest": is_nearest(torch.stack([(queries @ each.T).amax(dim=1) for each in pieces], dim=1)),
    }


def main(
    model: Annotated[str, Argument(help="An embedding model of sentence-transformers with a table of positions.")],
    method: Annotated[list[str], Option("--method", "-m", help="Repeatable.")],
    length: Annotated[list[int], Option("--length", "-l", help="Tokens of each document. Repeatable.")],
    factor: Annotated[float, Option("--factor", "-f", help="Target length / trained length.")] = 4.0,
    documents: Annotated[int, Option("--documents", "-n", min=2, max=len(FIRST) * len(LAST))] = 40,
    seed: int = 0,
) -> None:
    """Print the share of documents found by each way to read, and each method's difference to the best simple way."""
    encoder = SentenceTransformer(model, device="cpu")
    window = encoder[0].auto_model.config.max_position_embeddings
    shelves = [shelf(encoder.tokenizer, tokens, documents, seed) for tokens in length]
    simple = [found_at(encoder, shelved, window) for shelved in shelves]
    found = {name: [each[name] for each in simple] for name in simple[0]}
    for name in method:
        ctxext.patch(encoder, name, factor=factor)
        found[f"{name} x{factor:g}"] = [
            is_nearest(embed(encoder, asked, window) @ embed(encoder, texts, tokens).T)
            for tokens, (texts, asked) in zip(length, shelves, strict=True)
        ]
        ctxext.unpatch(encoder)
    best = max((found[name][-1] for name in simple[0]), key=sum)
    rows = []
    for name, at_lengths in found.items():
        shares = [f"{sum(right) / documents:.0%}" for right in at_lengths]
        gaps = [mine - theirs for mine, theirs in zip(at_lengths[-1], best, strict=True)]
        gap = score_difference(gaps, over="queries")
        rows.append([name, *shares, f"{100 * gap.mean:+.0f} ± {100 * gap.standard_error:.0f}"])
    title = f"Documents found by {Path(model).name}, {documents} of each length; {machine('cpu')}"
    header = ["read by", *(f"{tokens:,}" for tokens in length), "beside the best simple way at the last length, points"]
    print(markdown_table(title, header, rows))


if __name__ == "__main__":
    run_script(main)
