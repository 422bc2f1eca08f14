"""Distances to which the heads of a checkpoint attend in a text, before and after an extension."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.attention.attend import LayerCall
from ctxext.caches.records import attends_of
from ctxext.core.edits import Edits
from ctxext.core.patching import unpatch
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.evaluation.report.figures import NOTE, Panel
from ctxext.laboratory.pictures.picture import AFTER, BEFORE, GRADED, Curve, Numbers, Picture, heat, lines
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.measuring.forward import check_known, check_positions, last_position
from ctxext.measuring.readings import name_for
from ctxext.methods import Method

LONGEST = 1024  # tokens of a text that are read unless more are asked for
QUERIES = 64  # of the end of a text, over which attention is averaged


def attention_asked(method: Method | None, request: PictureRequest) -> Picture | None:
    """Return the picture of every head's attention by distance in a text, before and after; None without a text.

    Raises:
        IncompatibleError: the attention of the checkpoint cannot be seen.
        InvalidParameterError: no checkpoint, no method, or a text that is shorter than its given length.
    """
    if request.text is None:
        return None
    if request.checkpoint is None:
        raise InvalidParameterError(
            "--text is read by a checkpoint here, to show how far back its heads look: give one with --model."
        )
    if method is None:
        raise InvalidParameterError(
            "With --text the attention before and after an extension is drawn, and 'rope' is none. Name a method."
        )
    tokens = request.tokens(request.text)[0][:, : request.length or LONGEST]
    length = tokens.shape[1]
    if request.length is not None and length < request.length:
        raise InvalidParameterError(f"--length {request.length}: the text has {length} tokens. Give a longer one.")
    model = request.load(method)
    check_known(model, tokens)
    check_positions(Subject(model), length)
    trained = int(model.config.ctxext["trained_length"])
    edges = edges_of(length, trained)
    after = by_distance(attention_of(model, tokens, min(QUERIES, length)), edges)
    unpatch(model)
    known = last_position(Subject(model))
    if known is not None and length > known:
        raise InvalidParameterError(
            f"Before the extension, {request.model} has positions for {known:,} tokens, and the text has {length:,}. "
            f"Give --length {known}."
        )
    before = by_distance(attention_of(model, tokens, min(QUERIES, length)), edges)
    # Bins of distances begin at the edges, and the last ends there; one more bin is the first token.
    numbers = {"trained_length": trained, "length": length, "edges": edges, "before": before, "after": after}
    label = name_for(method)
    return Picture(
        kind="attention",
        sentence=_sentence(request.model, label, numbers),
        caption="Of the last tokens of the text: the share of each head's attention by how many tokens it goes back, "
        "or ahead where tokens see later ones. The first token of the text, which many heads take for nothing in "
        "particular, stands by itself. Right: the mean over all heads.",
        values={"method": method.to_dict(), **numbers, "model": request.model},
        panels=_panels(label, numbers),
    )


def _sentence(model: str, label: str, numbers: Numbers) -> str:
    length, trained, before, after = (numbers[name] for name in ("length", "trained_length", "before", "after"))
    if length <= trained:
        moved = float((after - before).abs().sum(-1).mean()) / 2
        return f"{model}: {label} moves {moved:.0%} of its heads' attention in a text of {length:,} tokens"
    far = [index for index, edge in enumerate(numbers["edges"][:-1]) if edge >= trained]
    without, extended = (float(shares[..., far].sum(-1).mean()) for shares in (before, after))
    return (
        f"{model}, {length:,} tokens: {extended:.0%} of attention goes beyond the {trained:,} trained with {label}, "
        f"{without:.0%} without"
    )


def _panels(label: str, numbers: Numbers) -> list[Panel]:
    """Return the shares of all heads before and after, and their mean."""
    layers, heads, bins = numbers["before"].shape
    largest = float(torch.stack([numbers["before"], numbers["after"]]).quantile(0.995))
    panels: list[Panel] = []
    curves = []

    def mark_layers(axes: Any) -> None:
        step = max(1, layers // 10)
        places = [layer * heads + (heads - 1) / 2 for layer in range(0, layers, step)]
        axes.set_yticks(places, [str(layer) for layer in range(0, layers, step)])
        for layer in range(1, layers):
            axes.axhline(layer * heads - 0.5, color="white", lw=0.5, alpha=0.7)
        _mark_bins(axes, numbers, "white")

    # One scale of colours for both panels, so that before and after compare.
    for title, shares, colour in (
        ("before", numbers["before"], BEFORE),
        (f"with {label}", numbers["after"], AFTER),
    ):
        panel = heat(
            title,
            shares.flatten(0, 1),
            size=(3.8, 4.6),
            shades=GRADED,
            scale=(0.0, largest),
            power=0.5,
            x="tokens back",
            y="" if panels else "layer, and in it each head",
            bar={"label": "share of the head's attention", "aspect": 30} if panels else None,
            panels=2,
            then=mark_layers,
            aspect="auto",
        )
        panels.append(panel)
        look = {"marker": "o", "ms": 3, "lw": 1.6, "label": title}
        curves.append(Curve(range(bins), shares.mean((0, 1)), colour, look))

    def then(axes: Any) -> None:
        axes.set_ylim(bottom=0)
        axes.set_xlim(-0.5, bins - 0.5)
        _mark_bins(axes, numbers, NOTE)

    mean = lines(
        "mean of all heads",
        curves,
        size=(3.9, 4.6),
        x="tokens back",
        y="share of attention",
        legend="best",
        then=then,
    )
    return [*panels, mean]


def _mark_bins(axes: Any, numbers: Numbers, colour: str) -> None:
    """Name distances where bins begin, and mark the first token and where the trained length ends."""
    starts, trained = numbers["edges"][:-1], numbers["trained_length"]
    # 0, 1 and every second octave: 4, 16, 64 ...
    ticks = [
        index for index, edge in enumerate(starts) if edge & (edge - 1) == 0 and (edge.bit_length() % 2 or not edge)
    ]
    names = [f"{starts[index]:,}" for index in ticks]
    axes.set_xticks([*ticks, len(starts)], [*names, "first"], rotation=90 if len(ticks) > 7 else 0)
    axes.axvline(len(starts) - 0.5, color=colour, lw=0.8)
    if trained < numbers["length"]:
        far = next(index for index, edge in enumerate(numbers["edges"]) if edge >= trained)
        axes.axvline(far - 0.5, color=colour, lw=1.2, ls=(0, (3, 1.5)))


@torch.no_grad()
def attention_of(
    model: PreTrainedModel, tokens: Int[Tensor, "1 seq"], last: int
) -> Float[Tensor, "layer head query key"]:
    """Return the attention that the last tokens of a text pay to all of it, layer by layer.

    The model is unchanged afterwards. Where its attention is not ctxext's, ``eager`` computes attention here.

    Raises:
        IncompatibleError: its attention can be seen in neither way.
    """
    own = attends_of(model)
    weights = _of_ours(model, own, tokens, last) if own else _of_its_own(model, tokens, last)
    if not weights:
        raise IncompatibleError(f"{type(model).__name__} does not tell its attention, by eager or by ctxext's.")
    return torch.stack(weights)


def _of_ours(model: PreTrainedModel, layers: dict[nn.Module, Any], tokens: Tensor, last: int) -> list[Tensor]:
    """Return the weights of ctxext's attention, which are its output for unit vectors as values."""
    edits, weights = Edits(), list[Tensor]()

    def watched(attend: Any) -> Any:
        def attention(layer: LayerCall) -> Any:
            keys, v, parts = layer.k.shape[2], layer.v, []
            width = v.shape[-1]
            for start in range(0, keys, width):  # attention takes values that are as wide as keys
                units = torch.eye(keys, width, dtype=v.dtype, device=v.device).roll(start, 0)
                part = attend(layer._replace(v=units.expand(*v.shape[:2], -1, -1)))
                parts.append(part[0, :, -last:, : min(width, keys - start)].float().cpu())
            weights.append(torch.cat(parts, -1))
            return attend(layer)

        return attention

    for layer, attend in layers.items():
        edits.set(layer, "_ctxext_attend", watched(attend))
    try:
        model(tokens, use_cache=False)
    finally:
        edits.undo()
    return weights


def _of_its_own(model: PreTrainedModel, tokens: Tensor, last: int) -> list[Tensor]:
    """Return the weights that a model's eager attention gives."""
    weights: list[Tensor] = []
    pairs, latest = (tokens.shape[1], tokens.shape[1]), dict[str, Any]()

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        shown = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if shown is not None and getattr(shown, "shape", ())[-2:] == pairs and shown is not latest.get("weights"):
            weights.append(shown[0, :, -last:].float().cpu())
            latest["weights"] = shown  # some blocks hand on what their attention returned

    used = model.config._attn_implementation
    model.set_attn_implementation("eager")
    hooks = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(used)
    return weights


def edges_of(length: int, trained: int = 0) -> tuple[int, ...]:
    """Return half octaves: 0, 1, 2, 3, 4, 6, 8, 12 ... and the length, and among them the trained length."""
    edges = [0, 1, 2, 3]
    while edges[-1] < length:
        edges.append(edges[-2] * 2)
    return (*sorted({edge for edge in (*edges, trained) if edge < length}), length)


def by_distance(weights: Float[Tensor, "*any query key"], edges: tuple[int, ...]) -> Float[Tensor, "*any bin"]:
    """Return the share of attention by distance, the first token apart, as a mean over the last queries of a text."""
    queries, keys = weights.shape[-2:]
    apart = (torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)).abs()
    bins = torch.bucketize(apart, torch.tensor(edges[1:]), right=True)
    bins[:, 0] = len(edges) - 1
    shares = [(weights * (bins == index)).sum((-2, -1)) / queries for index in range(len(edges))]
    return torch.stack(shares, -1)
