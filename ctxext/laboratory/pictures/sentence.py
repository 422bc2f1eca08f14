"""What an encoding makes of a text, for each query and key, where that depends on the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.report.style import INK, NOTE
from ctxext.laboratory.pictures.bias import pairs_at
from ctxext.laboratory.pictures.picture import Picture
from ctxext.laboratory.pictures.rows import DIVERGING
from ctxext.methods.encoding import Encoding, EncodingMethod
from ctxext.spec import EncodingSpec, Pairs, PairScore
from ctxext.surgery.edits import Edits

MOST_TOKENS = 48  # more have no room for their names
HEADS = 4  # of the toy
SHOWN = 2  # heads that stand side by side, so that the number of each cell can be read
NUMBERED = 18  # tokens up to which cells are large enough to hold their number
DEEPER = "YlGnBu"  # light for none, dark for much, as in the matrix of positions
CAPTION = "Queries down, keys across. Each row is what one token, when it reads, is told of all tokens before it."


@dataclass(frozen=True, eq=False)
class SentenceSeen:
    """What an encoding makes of a text in numbers.

    Args:
        what: the numbers are.
        layer: that they were seen in, from 0 on.
        tokens: of the text.
        values: of each head, query and key; not a number where a query does not see a key.
    """

    what: str
    layer: int
    tokens: tuple[str, ...]
    values: Float[Tensor, "head query key"]


@dataclass
class _Recorder:
    """Stands in for the ``score`` of an encoding, and remembers what it was asked."""

    encoding: Encoding
    asked: list[Pairs] = field(default_factory=list)

    def __call__(self, pairs: Pairs) -> PairScore | None:
        self.asked.append(pairs)
        return type(self.encoding).score(self.encoding, pairs)


@torch.no_grad()
def depends_on_text(method: EncodingMethod, spec: EncodingSpec) -> bool:
    """Whether what it adds to scores depends on more than positions.

    Seen on random weights: those that it begins with may be such that nothing shows.
    """
    if method.form == "added":
        return False
    encoding, generator = method.build(spec), torch.Generator().manual_seed(0)
    for weight in encoding.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    if method.carries or method.form == "own":
        return True
    distances = torch.arange(8)
    scores = [encoding.score(pairs_at(spec, 7, distances, seed=seed)) for seed in (1, 2)]
    first, second = (score.rows(slice(None)) for score in scores if score is not None)
    return first.shape != second.shape or not torch.equal(first, second)


def toy(words: int, longest: int) -> PreTrainedModel:
    """A random model of one layer that reads numbers of words, whose keys are its queries: equal words attract."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        max_position_embeddings=longest,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = nn.Parameter(attention.q_proj.weight.detach().clone())
    return model


@torch.no_grad()
def sentence_seen(model: PreTrainedModel, tokens: Tensor, names: tuple[str, ...], layer: int) -> SentenceSeen:
    """What the encoding of a patched model makes of a text.

    Args:
        model: carries an encoding; it is as before afterwards.
        tokens: ``[1, seq]``.
        names: of the tokens.
        layer: attention layer, from 0 on.

    Raises:
        InvalidParameterError: a text that is too long to be drawn, or a layer that there is not.
    """
    if len(names) > MOST_TOKENS:
        raise InvalidParameterError(
            f"The text has {len(names)} tokens, and a picture has room for the names of {MOST_TOKENS}. Give a shorter "
            f"one."
        )
    encodings = [module for module in model.modules() if isinstance(module, Encoding)]
    recorders = [_Recorder(encoding) for encoding in encodings]
    edits = Edits()
    for recorder in recorders:
        edits.set(recorder.encoding, "score", recorder)
    try:
        model(tokens)
    finally:
        edits.undo()
    asked = [(recorder.encoding, pairs) for recorder in recorders for pairs in recorder.asked]
    if not 0 <= layer < len(asked):
        raise InvalidParameterError(f"There is no layer {layer}: this model has {len(asked)}, from 0 on.")
    encoding, pairs = asked[layer]
    what, values = encoding.seen(pairs)
    return SentenceSeen(what, layer, names, _unseen_hidden(values[0].double().cpu()))


def _unseen_hidden(values: Float[Tensor, "head query key"]) -> Float[Tensor, "head query key"]:
    later = torch.ones(values.shape[1:], dtype=torch.bool).triu(1)
    return values.masked_fill(later, torch.nan)


def picture_of_sentence(found: SentenceSeen, *, label: str, saved: dict[str, Any], of: str) -> Picture:
    """One matrix per head, the text on both axes.

    Args:
        found: the numbers.
        label: what the method is called.
        saved: its saved form.
        of: whose queries and keys these are, as a title ends.
    """
    heads = min(SHOWN, len(found.values))
    side = min(max(3.0, 0.27 * len(found.tokens)), 4.6)
    size = (max(heads * side + 1.9, 8.0), side + 1.1)
    said = f"{label}: {found.what}, in layer {found.layer} of {of}"
    return Picture.of(
        found,
        "sentence",
        saved=saved,
        said=said,
        caption=CAPTION,
        size=size,
        draw=lambda figure: _draw(figure, found, heads),
    )


def _draw(figure: Any, found: SentenceSeen, heads: int) -> None:
    panels = figure.subplots(1, heads, sharey=True, squeeze=False)[0]
    values = found.values[:heads]
    known = values[~values.isnan()]
    low, high = float(known.min()), float(known.max())
    both = low < 0 < high
    largest = max(-low, high)
    limits = (-largest, largest) if both else (min(low, 0.0), max(high, 0.0))
    names = [token if len(token) <= 12 else f"{token[:11]}…" for token in found.tokens]
    fontsize = 7.5 if len(names) <= 24 else 5
    for head, panel in enumerate(panels):
        image = panel.imshow(
            values[head].numpy(),
            cmap=DIVERGING if both else f"{DEEPER}_r" if high <= 0 else DEEPER,
            vmin=limits[0],
            vmax=limits[1],
            interpolation="nearest",
        )
        if len(names) <= NUMBERED:
            _number(panel, values[head], limits, both)
        panel.set_title(f"head {head}", loc="left", fontsize=9.5, color=INK)
        panel.set_xticks(range(len(names)), names, rotation=90, fontsize=fontsize)
        panel.set_yticks(range(len(names)), names, fontsize=fontsize)
        panel.tick_params(length=0, pad=2)
        for spine in panel.spines.values():
            spine.set_visible(False)
    bar = figure.colorbar(image, ax=panels.tolist(), shrink=0.75, aspect=24, pad=0.012)
    bar.set_label(found.what, fontsize=8, color=NOTE)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2, colors=NOTE)


def _number(panel: Any, values: Float[Tensor, "query key"], limits: tuple[float, float], both: bool) -> None:
    """The number of each cell, in an ink that is read on its colour."""
    least, most = limits
    for query, row in enumerate(values.tolist()):
        for key, value in enumerate(row[: query + 1]):
            depth = abs(value) / max(abs(least), abs(most), 1e-9)
            ink = "white" if depth > (0.7 if both else 0.55) else "#222222"
            panel.text(key, query, f"{round(value, 1) + 0.0:.1f}", ha="center", va="center", fontsize=5.8, color=ink)
