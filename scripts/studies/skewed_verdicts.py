"""How often is a verdict wrong where documents' effects are skewed, and would another interval do better? A simulation.

Each document gives one number, whose true mean is 0. A cell holds the percentages of better (below 0) and of worse; 2.5
of each are promised. "Finds" is the percentage of better where effects are normal and lower by one or two standard
deviations. ``worse`` of a distribution is ``better`` of its mirror image, so that one sign of each skewed one will do.

* Student: the verdict of ctxext.
* signs: all ways to draw the signs of the effects, exact where these are symmetric.
* Johnson, Hall: Student's statistic corrected for the skewness of the sample, Hall's so that it grows with the mean.
* bootstrap: Student's statistic against those of resampled documents.
* both: Student's and Hall's verdict where they agree.

Source: Johnson, Journal of the American Statistical Association 73 (1978), 536-544; Hall, Journal of the Royal
Statistical Society B 54 (1992), 221-228; Efron & Tibshirani, An Introduction to the Bootstrap (1993), section 12.5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor
from typer import Option

from ctxext.measuring.statistics import CHANCE, students_quantile

DOCUMENTS = (3, 5, 8, 20)
RESAMPLED = 400
Judge = Callable[[Tensor], tuple[Tensor, Tensor]]


def moments(effects: Tensor) -> tuple[Tensor, Tensor]:
    """Return each run's mean in standard deviations, and its skewness."""
    units, apart = effects.shape[1], effects - effects.mean(1, keepdim=True)
    spread = effects.std(1)
    third = apart.pow(3).sum(1) * units / ((units - 1) * (units - 2))
    return effects.mean(1) / spread, third / spread.pow(3)


def beyond(statistic: Tensor, units: int) -> tuple[Tensor, Tensor]:
    """Return which runs are better and worse by Student's quantile."""
    needed = students_quantile(CHANCE, units - 1)
    return statistic < -needed, statistic > needed


def student(effects: Tensor) -> tuple[Tensor, Tensor]:
    """The verdict of ctxext: ``grouped_difference`` of many runs at a time."""
    return beyond(moments(effects)[0] * math.sqrt(effects.shape[1]), effects.shape[1])


def johnson(effects: Tensor) -> tuple[Tensor, Tensor]:
    """Johnson's equation 2.6."""
    (mean, skew), units = moments(effects), effects.shape[1]
    return beyond(math.sqrt(units) * (mean + skew / (6 * units) + skew * mean**2 / 3), units)


def hall(effects: Tensor) -> tuple[Tensor, Tensor]:
    """Hall's monotone cubic transformation, against Student's quantile."""
    (mean, skew), units = moments(effects), effects.shape[1]
    cubic = mean + skew * mean**2 / 3 + skew**2 * mean**3 / 27 + skew / (6 * units)
    return beyond(math.sqrt(units) * cubic, units)


def both(effects: Tensor) -> tuple[Tensor, Tensor]:
    """Student's verdict where Hall's is the same."""
    first, second = student(effects), hall(effects)
    return first[0] & second[0], first[1] & second[1]


def signs(effects: Tensor) -> tuple[Tensor, Tensor]:
    """Fisher's test of all signs; of more than ten documents it is Student's to a tenth of a percent."""
    if effects.shape[1] > 10:
        return student(effects)
    ways = torch.tensor(list(itertools.product((1.0, -1.0), repeat=effects.shape[1])), dtype=effects.dtype)
    sums, found = effects @ ways.T, effects.sum(1, keepdim=True)
    return tuple(shares.double().mean(1) <= CHANCE / 2 for shares in (sums <= found + 1e-12, sums >= found - 1e-12))


def bootstrap(effects: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of Student's statistics of resampled documents; without spread, they are infinite."""
    units = effects.shape[1]
    drawn = torch.randint(units, (len(effects), RESAMPLED * units), generator=torch.Generator().manual_seed(1))
    resampled = effects.gather(1, drawn).view(len(effects), RESAMPLED, units)
    apart = resampled.mean(2) - effects.mean(1, keepdim=True)
    statistics = (apart / resampled.std(2) * math.sqrt(units)).nan_to_num(0.0).sort(1).values
    low, high = statistics[:, int(RESAMPLED * CHANCE / 2)], statistics[:, -1 - int(RESAMPLED * CHANCE / 2)]
    statistic = moments(effects)[0] * math.sqrt(units)
    return statistic < low, statistic > high


JUDGES: dict[str, Judge] = {
    "Student": student,
    "signs": signs,
    "Johnson": johnson,
    "Hall": hall,
    "bootstrap": bootstrap,
    "both": both,
}


def drawn(runs: int, units: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return effects of each distribution, ``[runs, units]``, with a true mean of 0."""
    normal, *chi = torch.randn(4, runs, units, generator=generator, dtype=torch.float64)
    even = torch.rand(runs, units, generator=generator, dtype=torch.float64)
    return {
        "normal": normal,
        "Student's, 2 degrees": normal / ((chi[0] ** 2 + chi[1] ** 2) / 2).sqrt(),
        "exponential": -torch.log1p(-even) - 1,
        "lognormal": chi[2].exp() - math.exp(0.5),
    }


def main(
    runs: Annotated[int, Option(min=1, help="Simulated measurements of each setting.")] = 8000,
    seed: Annotated[int, Option(help="Of all chance.")] = 0,
) -> None:
    """Print the table in CSV."""
    generator = torch.Generator().manual_seed(seed)
    typer.echo('documents,interval,normal,"Student\'s, 2 degrees",exponential,lognormal,finds 1,finds 2')
    for units in DOCUMENTS:
        effects = drawn(runs, units, generator)
        for name, judge in JUDGES.items():
            wrong = [" / ".join(f"{100 * found.double().mean():.1f}" for found in judge(e)) for e in effects.values()]
            finds = [f"{100 * judge(effects['normal'] - gain)[0].double().mean():.0f}" for gain in (1, 2)]
            typer.echo(",".join([str(units), name, *wrong, *finds]))


if __name__ == "__main__":
    typer.run(main)
