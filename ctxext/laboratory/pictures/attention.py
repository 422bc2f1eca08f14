"""How far back the heads of a checkpoint look in a text, before and after an extension."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError
from ctxext.evaluation.report.style import NOTE
from ctxext.laboratory.pictures.picture import AFTER, BEFORE, GRADED, Picture, quiet
from ctxext.surgery.edits import Edits

QUERIES = 64  # of the end of a text, over which attention is averaged
CAPTION = (
    "Of the last tokens of the text: the share of each head's attention that goes so many tokens back. The first token "
    "of the text, which many heads take for nothing in particular, stands by itself. Right: the mean over all heads."
)


@dataclass(frozen=True, eq=False)
class Looks:
    """Attention by distance in numbers.

    Args:
        trained_length: tokens that the checkpoint was trained for.
        length: tokens of the text.
        edges: where the bins of distances begin, in tokens, and where the last ends; one more bin is the first token.
        before: share of attention of each layer, head and bin, as the checkpoint is.
        after: likewise, extended.
    """

    trained_length: int
    length: int
    edges: tuple[int, ...]
    before: Float[Tensor, "layer head bin"]
    after: Float[Tensor, "layer head bin"]


@dataclass
class _Watched:
    """Stands in for ctxext's attention of one layer, and takes its weights: what it makes of values that are units."""

    attend: Any
    last: int
    weights: list[Tensor] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Tensor:
        keys, size = k.shape[2], v.shape[-1]
        parts = []
        for start in range(0, keys, size):  # attention takes values that are as wide as keys
            units = torch.eye(keys, size, dtype=v.dtype, device=v.device).roll(start, 0)
            part = self.attend(q, k, units.expand(*v.shape[:2], -1, -1), mask, **how)
            parts.append(part[0, :, -self.last :, : min(size, keys - start)].float().cpu())
        self.weights.append(torch.cat(parts, -1))
        found: Tensor = self.attend(q, k, v, mask, **how)
        return found


@torch.no_grad()
def attention_of(
    model: PreTrainedModel, tokens: Int[Tensor, "1 seq"], last: int
) -> Float[Tensor, "layer head query key"]:
    """The attention that the last tokens of a text pay to all of it, layer by layer.

    Args:
        model: it is as before afterwards. Where it computes attention by its own code, ``eager`` does it here.
        tokens: the text.
        last: queries.

    Raises:
        IncompatibleError: if its attention can be seen in neither way.
    """
    own = [module for module in model.modules() if "_ctxext_attend" in module.__dict__]
    found = _of_ours(model, own, tokens, last) if own else _of_its_own(model, tokens, last)
    if not found:
        raise IncompatibleError(f"{type(model).__name__} does not tell its attention, by eager or by ctxext's.")
    return torch.stack(found)


def _of_ours(model: PreTrainedModel, layers: list[nn.Module], tokens: Tensor, last: int) -> list[Tensor]:
    edits, watched = Edits(), []
    for layer in layers:
        watched.append(_Watched(layer.__dict__["_ctxext_attend"], last))
        edits.set(layer, "_ctxext_attend", watched[-1])
    try:
        model(tokens, use_cache=False)
    finally:
        edits.undo()
    return [weights for one in watched for weights in one.weights]


def _of_its_own(model: PreTrainedModel, tokens: Tensor, last: int) -> list[Tensor]:
    found: list[Tensor] = []
    pairs = (tokens.shape[1], tokens.shape[1])

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) > 1 and getattr(output[1], "shape", ())[-2:] == pairs:
            found.append(output[1][0, :, -last:].float().cpu())

    used = model.config._attn_implementation
    model.set_attn_implementation("eager")
    hooks = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(used)
    return found


def edges_of(length: int) -> tuple[int, ...]:
    """Half octaves: 0, 1, 2, 3, 4, 6, 8, 12 ... and the length."""
    edges = [0, 1, 2, 3]
    while edges[-1] < length:
        edges.append(edges[-2] * 2)
    return (*[edge for edge in edges if edge < length], length)


def by_distance(weights: Float[Tensor, "*any query key"], edges: tuple[int, ...]) -> Float[Tensor, "*any bin"]:
    """The share of attention by distance, the first token apart, as a mean over the last queries of a text."""
    queries, keys = weights.shape[-2:]
    apart = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    bins = torch.bucketize(apart, torch.tensor(edges[1:]), right=True)
    bins[:, 0] = len(edges) - 1
    shares = [(weights * (bins == index)).sum((-2, -1)) / queries for index in range(len(edges))]
    return torch.stack(shares, -1)


def picture_of_attention(found: Looks, *, label: str, name: str, saved: dict[str, Any]) -> Picture:
    """Every head's attention by distance, before and after, and the mean of all.

    Args:
        found: the numbers.
        label: what the method is called.
        name: of the model.
        saved: the method's saved form.
    """
    size, said = (11.5, 4.9), _said(found, label, name)
    return Picture.of(
        found,
        "attention",
        saved=saved,
        said=said,
        caption=CAPTION,
        size=size,
        draw=lambda figure: _draw(figure, found, label),
        model=name,
    )


def _said(found: Looks, label: str, name: str) -> str:
    moved = float((found.after - found.before).abs().sum(-1).mean()) / 2
    if found.length <= found.trained_length:
        return f"{name}: {label} moves {moved:.0%} of its heads' attention in a text of {found.length:,} tokens"
    far = [index for index, edge in enumerate(found.edges[:-1]) if edge >= found.trained_length]
    before, after = (float(shares[..., far].sum(-1).mean()) for shares in (found.before, found.after))
    return (
        f"{name}, {found.length:,} tokens: {after:.0%} of attention goes beyond the {found.trained_length:,} trained "
        f"with {label}, {before:.0%} without"
    )


def _draw(figure: Any, found: Looks, label: str) -> None:
    from matplotlib.colors import PowerNorm

    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.05))
    layers, heads, bins = found.before.shape
    largest = float(torch.stack([found.before, found.after]).quantile(0.995))
    for axes, title, shares in ((left, "before", found.before), (middle, f"with {label}", found.after)):
        image = axes.imshow(
            shares.flatten(0, 1).numpy(),
            aspect="auto",
            cmap=GRADED,
            norm=PowerNorm(0.5, 0, largest),
            interpolation="nearest",
        )
        quiet(axes, title, x="tokens back", y="layer, and in it each head" if axes is left else "", grid="")
        step = max(1, layers // 10)
        places = [layer * heads + (heads - 1) / 2 for layer in range(0, layers, step)]
        axes.set_yticks(places, [str(layer) for layer in range(0, layers, step)])
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="white", lw=0.5, alpha=0.7)
        _bins(axes, found, "white")
    bar = figure.colorbar(image, ax=[left, middle], pad=0.015, aspect=30)
    bar.set_label("share of the head's attention", fontsize=8, color=NOTE)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, colors=NOTE)
    for shares, colour, said in ((found.before, BEFORE, "before"), (found.after, AFTER, f"with {label}")):
        right.plot(range(bins), shares.mean((0, 1)).tolist(), "o-", ms=3, lw=1.6, color=colour, label=said)
    quiet(right, "mean of all heads", x="tokens back", y="share of attention")
    right.set_ylim(bottom=0)
    right.set_xlim(-0.5, bins - 0.5)
    _bins(right, found, NOTE)
    right.legend(fontsize=8.5, frameon=False)


def _bins(axes: Any, found: Looks, colour: str) -> None:
    """Distances where bins begin, the first token, and where the trained length ends."""
    starts = found.edges[:-1]
    ticks = [
        index for index, edge in enumerate(starts) if index in (0, 1) or (edge & (edge - 1) == 0 and index % 4 == 0)
    ]
    said = [f"{starts[index]:,}" for index in ticks]
    axes.set_xticks([*ticks, len(starts)], [*said, "first"], rotation=90 if len(ticks) > 7 else 0)
    axes.axvline(len(starts) - 0.5, color=colour, lw=0.8)
    if found.trained_length < found.length:
        far = next(index for index, edge in enumerate(found.edges) if edge >= found.trained_length)
        axes.axvline(far - 0.5, color=colour, lw=1.2, ls=(0, (3, 1.5)))
