"""Searches of rotary frequencies at equal passes: LongRoPE's genetic one, and the grid of `ctxext choose`.

    python scripts/studies/compare_searches.py CHECKPOINT -t train.parquet --held-out other.parquet --target 512 -o out
    python scripts/studies/compare_searches.py CHECKPOINT --text train.parquet --held-out other.parquet --target 512 \
        --search longrope-ga --search grid --seed 0 --passes 224 -o out

Each search may read as much as ``--passes`` batches of texts of the target length. Its result is judged on texts of
other files, paired by token, the spread over documents. Everything finished is kept in the output folder: run the same
command again after an interruption, or with more searches or seeds. The two searches by gradients of the table are in
commit d0f3063.

``longrope-ga`` is the search of LongRoPE (Ding et al., arXiv:2402.13753, section 3 and table 4), with the numbers of
its code, microsoft/LongRoPE@c9e56aa, evolution/: one divisor per pair of dimensions, never less than that of the pair
before it; a population of 64, of which the best 32 are parents; in each round 16 mutations (each divisor with
probability 0.3 drawn anew between its neighbours, in steps of 0.01) and 16 crossovers; fitness is the loss on the same
few texts for all; the best of all wins. Paper and code differ, and here the paper is followed, to the search's
advantage: PI, NTK *and* YaRN begin it (the code: YaRN alone), and divisors go to 1.25 times the factor (the code: the
factor plus 1). As in both, the scale of cos and sin is sqrt(1 + ln(factor) / ln(trained length)) and is not searched.
YaRN's seed blends divisors, as the code does, and not frequencies. Left out are the unrotated start tokens of the
paper, which its code does not search and no checkpoint has; ``--auto-rescale-init-factors`` and ``dim_piece_mono``,
which do not work in the code; and that the code chooses and reports on the same texts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[2]))


from ctxext.caches.digest import weights_digest
from ctxext.choosing.candidates import grid
from ctxext.core.patching import patched
from ctxext.core.subject import Subject
from ctxext.measuring.journal import Journal
from ctxext.measuring.loss import loss_by_position
from ctxext.measuring.readings import TIMES
from ctxext.measuring.statistics import PairedDifference, document_difference
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.ntk import NTK
from ctxext.methods.pi import PI
from ctxext.methods.yarn import YaRN
from ctxext.rotary.sites import find_sites
from ctxext.spec import RopeSpec
from ctxext.texts.corpus import TokenisedDocument, corpus_of
from ctxext.texts.documents import read_documents
from scripts.bench import machine, markdown_table

# Of the genetic search: individuals, parents, new ones of each kind in a round, chance that a divisor changes, the step
# between two divisors, how often a crossover is tried, and by how much the longest divisor may exceed the factor.
POPULATION, PARENTS, NEW, CHANCE, STEP, TRIES, MOST = 64, 32, 16, 0.3, 0.01, 20, 1.25
USUAL = "yarn, as published"

# Logarithms of what each frequency is divided by, and last that of what cos and sin are multiplied by; float64.
Vector = Tensor


def vector_of(method: RopeMethod, rope: RopeSpec, length: int) -> Vector:
    """The vector of a method that is one set of frequencies, none of them 0."""
    frequencies = method.frequencies(rope, length)
    divisors = plain_inv_freq(rope) / frequencies.inv_freq
    return torch.cat([divisors, torch.tensor([frequencies.attention_scale], dtype=torch.float64)]).log()


def as_method(vector: Vector, factor: float) -> LongRoPE:
    """A vector as a method that plain transformers loads: one set of factors, for short texts and long ones."""
    *divisors, scale = (round(value, 8) for value in vector.exp().tolist())
    return LongRoPE(factor=factor, short_factor=tuple(divisors), long_factor=tuple(divisors), attention_factor=scale)


@dataclass(eq=False, kw_only=True)
class Problem:
    """What every search is given: a model, batches of texts and how many of them it may read.

    Args:
        model: the model, unextended.
        rope: of the model.
        target: tokens.
        batch: a new batch of texts, by its number; the same for all searches with one seed.
        passes: batches that may be read.
        seed: of all that is drawn.
    """

    model: Any
    rope: RopeSpec
    target: int
    batch: Callable[[int], Tensor]
    passes: float
    seed: int
    spent: float = field(init=False, default=0.0)

    @property
    def factor(self) -> float:
        """Target length over trained length."""
        return self.target / self.rope.trained_length

    def loss(self, vector: Vector, batch: int = 0) -> float:
        """A pass over a batch."""
        self.spent += 1
        with patched(self.model, as_method(vector, self.factor)):
            return loss_by_position(self.model, self.batch(batch)).mean().item()


def best_of_grid(problem: Problem) -> Vector:
    """The best point of a grid over YaRN's four numbers; each reads an equal share of the passes."""
    vectors = {tuple(vector_of(one, problem.rope, problem.target).tolist()): one for one in grid(problem.factor)}
    points = [torch.tensor(one, dtype=torch.float64) for one in vectors]
    points = points[: max(1, int(problem.passes))]
    each = max(1, int(problem.passes / len(points)))
    return min(points, key=lambda point: sum(problem.loss(point, batch) for batch in range(each)))


Divisors = tuple[float, ...]


class Genetic:
    """LongRoPE's search; see the top of this file."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.draw = random.Random(f"genetic {problem.seed}")
        self.scale = math.sqrt(1 + math.log(problem.factor) / math.log(problem.rope.trained_length))
        self.fitness: dict[Divisors, float] = {}

    def run(self) -> Vector:
        """The best of all that the passes last for."""
        population = self._begin()
        while self._may_go_on():
            parents = sorted(population, key=self.fitness.__getitem__)[:PARENTS]
            mutants = [self._mutated(self.draw.choice(parents)) for _ in range(NEW)]
            children = [self._child(*sorted(self.draw.sample(range(len(parents)), 2)), parents) for _ in range(NEW)]
            population = parents + [one for one in (*mutants, *children) if one in self.fitness]
        return self._vector(min(self.fitness, key=self.fitness.__getitem__))

    def _begin(self) -> list[Divisors]:
        factor, rope, target = self.problem.factor, self.problem.rope, self.problem.target
        methods = (PI(factor=factor), NTK(factor=factor), YaRN(factor=factor, blend="wavelength"))
        seeds = [tuple(vector_of(one, rope, target)[:-1].exp().tolist()) for one in methods]
        for seed in seeds:
            self._measure(seed)
        mutants = [self._mutated(seeds[number % len(seeds)]) for number in range(POPULATION - len(seeds))]
        return [one for one in dict.fromkeys([*seeds, *mutants]) if one in self.fitness]

    def _may_go_on(self) -> bool:
        return self.problem.spent + 1 <= self.problem.passes

    def _vector(self, divisors: Divisors) -> Vector:
        return torch.tensor([*divisors, self.scale], dtype=torch.float64).log()

    def _measure(self, divisors: Divisors) -> Divisors:
        if self._may_go_on():
            self.fitness[divisors] = self.problem.loss(self._vector(divisors))
        return divisors

    def _is_new(self, divisors: Divisors) -> bool:
        return divisors not in self.fitness and all(a <= b for a, b in itertools.pairwise(divisors))

    def _mutated(self, parent: Divisors) -> Divisors:
        found = list(parent)
        while not self._is_new(tuple(found)):
            for place in range(len(found)):
                if self.draw.random() < CHANCE:
                    least = found[place - 1] if place else 1.0
                    most = found[place + 1] if place + 1 < len(found) else MOST * self.problem.factor
                    found[place] = least + STEP * self.draw.randint(0, max(0, int((most - least) / STEP)))
        return self._measure(tuple(found))

    def _child(self, one: int, other: int, parents: Sequence[Divisors]) -> Divisors:
        """The first parent with some divisors of the second; a mutation of the first where that is no new one."""
        found = list(parents[one])
        for _ in range(TRIES):
            for place in range(len(found)):
                if self.draw.random() < CHANCE / 2:
                    found[place] = parents[other][place]
                    if self._is_new(tuple(found)):
                        return self._measure(tuple(found))
        return self._mutated(parents[one])


def genetic(problem: Problem) -> Vector:
    """LongRoPE's own search."""
    return Genetic(problem).run()


SEARCHES: dict[str, Callable[[Problem], Vector]] = {
    "longrope-ga": genetic,
    "grid": best_of_grid,
}
LABELS = {
    "longrope-ga": "LongRoPE's genetic search",
    "grid": "the grid alone, on more texts",
    USUAL: "no search: YaRN as published",
}


def windows(documents: Sequence[TokenisedDocument], tokens: int, count: int, draw: random.Random) -> Tensor:
    """Stretches of random documents from random places."""
    rows = []
    for _ in range(count):
        one = draw.choice(documents)
        rows.append(one.take(tokens, skip=draw.randrange(one.tokens - tokens + 1)).input_ids)
    return torch.cat(rows)


def judged(model: Any, vector: Vector, factor: float, texts: dict[str, Tensor]) -> Tensor:
    """Losses of held-out texts when the vector is the method of the model: [documents x windows x positions]."""
    with patched(model, as_method(vector, factor)):
        return torch.cat([loss_by_position(model, ids).flatten() for ids in texts.values()])


@dataclass(eq=False, kw_only=True)
class Study:
    """All searches of one checkpoint and target, and what is kept of them."""

    model: Any
    rope: RopeSpec
    target: int
    documents: Sequence[TokenisedDocument]
    held_out: dict[str, Tensor]
    passes: float
    rows: int
    journal: Journal
    console: Console

    @property
    def factor(self) -> float:
        """Target length over trained length."""
        return self.target / self.rope.trained_length

    def key(self, *parts: object) -> str:
        """Of everything that what is found depends on."""
        texts = [one.sha256 for one in self.documents], [int(ids.sum()) for ids in self.held_out.values()]
        told = [*map(str, parts), self.target, self.rows, self.rope.trained_length, *map(str, texts)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def batch(self, seed: int) -> Callable[[int], Tensor]:
        """Batches by number."""

        def of(number: int) -> Tensor:
            draw = random.Random(f"batch {seed} {number}")
            return windows(self.documents, self.target + 1, self.rows, draw)

        return of

    def run(self, search: str, seed: int) -> dict[str, Any]:
        """One search, or what an earlier run has found."""
        key = self.key(search, seed, self.passes)
        finished = self.journal.finished()
        if key not in finished:
            vector, about = self.searched(search, seed)
            losses = judged(self.model, vector, self.factor, self.held_out)
            line = {"key": key, "reading": search, "item": f"seed {seed}", "vector": vector.tolist()} | about
            self.journal.keep(line, losses)
            self.console.print(f"{search}, seed {seed}: {losses.mean():.4f}  {about}", highlight=False)
            finished = self.journal.finished()
        return finished[key]

    def searched(self, search: str, seed: int) -> tuple[Vector, dict[str, Any]]:
        """What a search finds, and what it spent."""
        if search == USUAL:
            return vector_of(YaRN(factor=self.factor), self.rope, self.target), {"spent": 0.0, "seconds": 0.0}
        began = time.process_time()
        problem = Problem(
            model=self.model,
            rope=self.rope,
            target=self.target,
            batch=self.batch(seed),
            passes=self.passes,
            seed=seed,
        )
        vector = SEARCHES[search](problem)
        return vector, {"spent": round(problem.spent, 1), "seconds": round(time.process_time() - began, 1)}

    def by_document(self, losses: Tensor, part: slice) -> list[Tensor]:
        """Of held-out texts, the positions of a part of each window, one tensor per document."""
        sizes = [len(ids) for ids in self.held_out.values()]
        whole = losses.view(-1, self.target)[:, part]
        return [rows.flatten() for rows in torch.split(whole, sizes)]

    def difference(self, own: Tensor, other: Tensor, part: slice) -> PairedDifference:
        """Of two searches, over documents."""
        return document_difference(self.by_document(own, part), self.by_document(other, part))


def table(study: Study, searches: Sequence[str], seeds: Sequence[int], place: str) -> str:
    """What all searches found, against the genetic one; over seeds, losses are averaged token by token."""
    found: dict[str, Tensor] = {}
    lines: dict[str, list[dict[str, Any]]] = {}
    for name in (USUAL, *searches):
        lines[name] = [study.run(name, seed) for seed in (seeds[:1] if name == USUAL else seeds)]
        found[name] = torch.stack([study.journal.losses(line) for line in lines[name]]).double().mean(0)
    trained = study.rope.trained_length
    against = "longrope-ga" if "longrope-ga" in searches else USUAL
    each = ("each seed",) if len(seeds) > 1 else ()
    columns = ("search", "passes", "CPU seconds", "loss beyond", *each, "beyond", "inside", "all")
    rows = []
    for name in sorted(found, key=lambda one: found[one].mean().item()):
        own, beyond = found[name], slice(trained, None)
        parts = [study.journal.losses(line).view(-1, study.target)[:, beyond].mean().item() for line in lines[name]]
        gaps = [
            "" if name == against else str(study.difference(own, found[against], part))
            for part in (beyond, slice(0, trained), slice(None))
        ]
        spent, seconds = (statistics.mean(line[key] for line in lines[name]) for key in ("spent", "seconds"))
        mean = own.view(-1, study.target)[:, beyond].mean().item()
        shown = [", ".join(f"{part:.4f}" for part in parts)] if each else []
        rows.append([LABELS[name], f"{spent:.0f}", f"{seconds:.0f}", f"{mean:.4f}", *shown, *gaps])
    documents, stretches = len(study.held_out), sum(map(len, study.held_out.values()))
    notes = [
        f"`beyond`, `inside` the trained window of {trained:,} tokens and `all`: loss minus that of "
        f"{LABELS[against]}, nats per token ± standard error over {documents} held-out documents ({stretches} "
        f"stretches of {study.target:,} tokens), paired by token, seeds averaged.",
        f"A pass reads {study.rows} stretches of {study.target:,} tokens. Seeds: {', '.join(map(str, seeds))}.",
        place,
    ]
    title = f"## {trained:,} to {study.target:,} tokens ({TIMES}{study.factor:g})"
    return markdown_table(title, columns, rows, notes)


def main(
    checkpoint: Annotated[Path, typer.Argument(help="A directory.")],
    text: Annotated[list[Path], typer.Option("--text", "-t", help="To search on. Repeatable.")],
    held_out: Annotated[list[Path], typer.Option("--held-out", help="To judge on. Repeatable.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder, where finished searches are kept.")],
    target: Annotated[int, typer.Option(help="Tokens to extend to.")],
    passes: Annotated[float, typer.Option(help="That each search may take.")] = 224.0,
    rows: Annotated[int, typer.Option(help="Stretches of text in a pass.")] = 8,
    stretches: Annotated[int, typer.Option(help="Held-out stretches of each document.")] = 12,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable.", show_default="0")] = None,
    search: Annotated[list[str] | None, typer.Option(help="Repeatable.", show_default="all")] = None,
    skip: Annotated[int, typer.Option(help="Tokens left out at the beginning of each text.")] = 2000,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json, where the checkpoint has none.")] = None,
    trained_length: Annotated[int | None, typer.Option(help="Where the config does not say it.")] = None,
) -> None:
    """Run the searches that are missing, and print and write the table."""
    console = Console(highlight=False, soft_wrap=True)
    unknown = [name for name in search or () if name not in SEARCHES]
    if unknown:
        raise typer.BadParameter(f"Unknown search {unknown[0]!r}; there are {', '.join(SEARCHES)}.")
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    known = trained_length or model.config.max_position_embeddings
    reads: Any = (
        AutoTokenizer.from_pretrained(checkpoint)
        if tokenizer is None
        else PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    )
    draw = random.Random("held out")
    documents, others = (
        corpus_of(read_documents(paths), reads, tokens=target + 1, whole=True, skip=skip).documents
        for paths in (text, held_out)
    )
    rope = find_sites(Subject.of(model), known)[0].spec
    journal = Journal(output / "cells.jsonl", identity="searches.json")
    digest = weights_digest(model)
    journal.claim({"made_by": "compare_searches", "checkpoint": {"name": checkpoint.name, "sha256": digest}})
    study = Study(
        model=model,
        rope=rope,
        target=target,
        documents=documents,
        held_out={
            f"{number} {one.name}": windows([one], target + 1, stretches, draw) for number, one in enumerate(others)
        },
        passes=passes,
        rows=rows,
        journal=journal,
        console=console,
    )
    place = f"{checkpoint.name} (sha256 {digest}); {machine('cpu')}."
    made = table(study, search or list(SEARCHES), seed or [0], place)
    console.print(made, markup=False)
    (output / f"table-{target}.md").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
