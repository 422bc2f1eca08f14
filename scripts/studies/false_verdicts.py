"""How often is a verdict wrong where nothing differs, and how often does it find what is there? A simulation.

Documents differ from each other by chance, with a standard deviation of 1 or of 0.1, and so do tokens, with one of 1.
"Wrong" is the share of better or worse where the true difference is 0; "finds" is the share of better where it is three
standard errors of a mean over documents that weigh the same. The columns are three ways to judge a mean: tokens weighed
alike with a sandwich (cluster) error and Student's quantile; the same corrected for few unequal clusters (CR2 with
Satterthwaite's degrees of freedom); and what ctxext does (``document_difference``).

Of fewer than five documents the verdict is about these texts: nothing differs between them, and a token shares a part
with the one before it.

Source: Bell & McCaffrey, Survey Methodology 28 (2002), 169-181, for CR2; of the rest ``ctxext.measuring.statistics``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor
from typer import Option

from ctxext.measuring.statistics import document_difference, students_quantile

SETTINGS = {
    "nine equal novels": [200] * 9,
    "nine novels of 30K to 500K tokens": [30, 45, 60, 80, 100, 130, 180, 300, 500],
    "one novel and four stories": [160, 10, 10, 10, 10],
    "LongPPL: key tokens of six texts": [120, 31, 14, 9, 6, 2],
    "choose: 16 stretches of one text, one of four": [1024, 64, 64, 64, 64],
    "weights 200:10:10:5:5": [200, 10, 10, 5, 5],
}
FEW = {
    "one text of 2,048": [2048],
    "two texts": [1500, 500],
    "three texts": [1024, 512, 512],
    "four texts": [2000, 100, 50, 30],
    "LongPPL: key tokens of four texts": [120, 31, 14, 9],
    "one text of 512": [512],
    "two texts of 512": [512, 512],
}
# These verdicts are cheaper than those over documents: so many times as many runs, in as many parts.
MORE = 4


@dataclass(frozen=True)
class Judged:
    """A mean, its standard error and how many of them a finding needs."""

    mean: float
    error: float
    needed: float

    @property
    def answer(self) -> str:
        """Better, worse or no difference."""
        if abs(self.mean) <= self.needed * self.error:
            return "no difference"
        return "better" if self.mean < 0 else "worse"


Judge = Callable[[Sequence[Tensor]], Judged]


def sandwich(texts: Sequence[Tensor]) -> Judged:
    """Tokens weigh the same; the cluster estimate times G / (G - 1), and G - 1 degrees of freedom."""
    sizes = torch.tensor([float(len(one)) for one in texts], dtype=torch.float64)
    weights, means = sizes / sizes.sum(), torch.stack([one.double().mean() for one in texts])
    mean, units = weights @ means, len(texts)
    error = ((weights * (means - mean)).square().sum() * units / (units - 1)).sqrt()
    return Judged(mean.item(), error.item(), students_quantile(0.05, units - 1))


def corrected(texts: Sequence[Tensor]) -> Judged:
    """Tokens weigh the same; CR2 and Satterthwaite's degrees of freedom, both for independent tokens."""
    sizes = torch.tensor([float(len(one)) for one in texts], dtype=torch.float64)
    weights, means = sizes / sizes.sum(), torch.stack([one.double().mean() for one in texts])
    mean = weights @ means
    factors = weights.square() / (1 - weights)
    error = (factors * (means - mean).square()).sum().sqrt()
    # Covariance of the residuals under the working model, in which a document's mean varies as 1 / size.
    spread = torch.diag(1 / sizes) - 1 / sizes.sum()
    product = torch.diag(factors) @ spread
    freedom = (product.trace().square() / (product @ product).trace()).item()
    below, above = (students_quantile(0.05, max(1, count)) for count in (math.floor(freedom), math.floor(freedom) + 1))
    share = freedom - math.floor(freedom) if freedom >= 1 else 0.0
    return Judged(mean.item(), error.item(), below + share * (above - below))


def ours(texts: Sequence[Tensor]) -> Judged:
    """As every verdict of ctxext."""
    found = document_difference(texts, [torch.zeros_like(one) for one in texts])
    return Judged(found.mean, found.standard_error, found.errors_needed())


JUDGES: dict[str, Judge] = {"sandwich": sandwich, "CR2": corrected, "ctxext": ours}


def draw(shape: tuple[int, ...], generator: torch.Generator, tails: bool) -> Tensor:
    """Standard normal numbers, or Student's with three degrees of freedom scaled to a variance of 1."""
    normal = torch.randn(shape, generator=generator)
    if not tails:
        return normal
    square = torch.randn((*shape, 3), generator=generator).square().mean(-1)
    return normal / square.sqrt() / math.sqrt(3)


def documents(
    sizes: Sequence[int], apart: float, tails: bool, runs: int, generator: torch.Generator
) -> list[list[Tensor]]:
    """For each run a tensor of losses of every document."""
    own = apart * draw((runs, len(sizes)), generator, tails)
    noise = draw((runs, sum(sizes)), generator, tails)
    return [
        [shift + part for shift, part in zip(shifts, row.split(list(sizes)), strict=True)]
        for shifts, row in zip(own, noise, strict=True)
    ]


def shares(texts: Sequence[Sequence[Tensor]], judge: Judge, effect: float) -> tuple[float, float]:
    """How often a judge finds something where nothing is, and where the losses are lower by ``effect``."""
    wrong = [judge(one).answer != "no difference" for one in texts]
    finds = [judge([part - effect for part in one]).answer == "better" for one in texts]
    return sum(wrong) / len(wrong), sum(finds) / len(finds)


def correlated(sizes: Sequence[int], keep: float, runs: int, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
    """Texts in which a token shares ``keep`` with the one before it."""
    noise = torch.randn(runs, sum(sizes) + 500, generator=generator)
    for place in range(1, noise.shape[1]):
        noise[:, place] += keep * noise[:, place - 1]
    return [row[500:].split(list(sizes)) for row in noise]


def main(
    runs: Annotated[int, Option(min=1, help="Simulated measurements of each setting.")] = 2000,
    seed: Annotated[int, Option(help="Of all chance.")] = 0,
) -> None:
    """Print both tables in Markdown."""
    generator, few = (torch.Generator().manual_seed(seed) for _ in range(2))
    heads = [f"{name}: {what}" for name in JUDGES for what in ("wrong", "finds")]
    typer.echo(f"| documents | between documents | tails | {' | '.join(heads)} |")
    typer.echo(f"|---|---:|---|{'---:|' * len(heads)}")
    for name, sizes in SETTINGS.items():
        for apart, tails in ((1.0, False), (0.1, False), (1.0, True)):
            variance = torch.tensor([apart**2 + 1 / size for size in sizes]).mean().item()
            texts = documents(sizes, apart, tails, runs, generator)
            found = [shares(texts, judge, 3 * math.sqrt(variance / len(sizes))) for judge in JUDGES.values()]
            cells = [f"{100 * share:.1f}" for pair in found for share in pair]
            typer.echo(f"| {name} | {apart:g} | {'heavy' if tails else 'normal'} | {' | '.join(cells)} |")
    typer.echo("\n| texts | tokens | 0 | 0.5 | 0.8 | 0.9 |\n|---|---|---:|---:|---:|---:|")
    for name, sizes in FEW.items():
        cells = []
        for keep in (0.0, 0.5, 0.8, 0.9):
            texts = [one for _ in range(MORE) for one in correlated(sizes, keep, runs, few)]
            cells.append(f"{100 * sum(ours(one).answer != 'no difference' for one in texts) / len(texts):.1f}")
        typer.echo(f"| {name} | {', '.join(f'{size:,}' for size in sizes)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
