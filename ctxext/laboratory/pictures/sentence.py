"""Scores and counts that an encoding makes of a text, for each query and key, where they depend on the text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ctxext.core.edits import Edits
from ctxext.core.patching import patch
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.report.figures import INK
from ctxext.laboratory.pictures.bias import pairs_at
from ctxext.laboratory.pictures.picture import DIVERGING, Picture, colour_bar, number_cells
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.methods.encoding import Encoding, EncodingMethod
from ctxext.spec import EncodingSpec, Pairs, PairScore

SENTENCE = "the cat saw the dog . the dog saw a cat . the cat ran"
MOST_TOKENS = 48  # more have no room for their names
SHOWN = 2  # heads that stand side by side, so that the number of each cell can be read
NUMBERED = 18  # tokens up to which cells are large enough to hold their number
DEEPER = "YlGnBu"  # light for none, dark for much, as in the matrix of positions


@dataclass(frozen=True, eq=False, kw_only=True)
class SentencePicture(Picture):
    """Numbers that an encoding makes of a text, one matrix per head.

    Args:
        values: number of each head, query and key; not a number where a query does not see a key.
    """

    kind = "sentence"
    caption = "Queries down, keys across. Each row is what one token, when it reads, is told of all tokens before it."

    what: str
    layer: int
    tokens: tuple[str, ...]
    values: Float[Tensor, "head query key"]

    @classmethod
    def of(cls, method: EncodingMethod, request: PictureRequest) -> SentencePicture:
        """Read the text with a checkpoint, or with an untrained toy.

        Raises:
            InvalidParameterError: no text, or one that is too long to be drawn; or a layer that there is not.
        """
        torch.manual_seed(0)
        if request.checkpoint is None:
            names = tuple((request.text or SENTENCE).split())
            if not names:
                raise InvalidParameterError("--text holds no word. Give a sentence.")
            words = list(dict.fromkeys(names))
            model = patch(_toy(len(words), request.trained_length or 64), method)
            tokens = torch.tensor([[words.index(name) for name in names]])
            place = "an untrained toy in which equal words attract"
        else:
            model, method, state = request.load_encoded(method)
            tokens, tokenizer = request.tokens(request.text or SENTENCE)
            pieces = tokenizer.convert_ids_to_tokens(tokens[0].tolist())
            names = tuple(
                piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "⏎").strip() or "·" for piece in pieces
            )
            place = request.model + (f", {state}" if state else "")
        if len(names) > MOST_TOKENS:
            raise InvalidParameterError(
                f"The text has {len(names)} tokens, and a picture has room for the names of {MOST_TOKENS}. Give a "
                f"shorter one."
            )
        what, values = _seen(model, tokens, request.layer)
        title = f"{method.name}: {what}, in layer {request.layer} of {place}"
        return cls(method=method, title=title, what=what, layer=request.layer, tokens=names, values=values)

    @property
    def heads(self) -> int:
        """Number of heads that are drawn."""
        return min(SHOWN, len(self.values))

    @property
    def size(self) -> tuple[float, float]:
        side = min(max(3.0, 0.27 * len(self.tokens)), 4.6)
        return max(self.heads * side + 1.9, 8.0), side + 1.1

    def draw(self, figure: Any) -> None:
        panels = figure.subplots(1, self.heads, sharey=True, squeeze=False)[0]
        values = self.values[: self.heads]
        known = values[~values.isnan()]
        low, high = min(float(known.min()), 0.0), max(float(known.max()), 0.0)
        both, largest = low < 0 < high, max(-low, high)
        names = [token if len(token) <= 12 else f"{token[:11]}…" for token in self.tokens]
        fontsize = 7.5 if len(names) <= 24 else 5
        for head, panel in enumerate(panels):
            image = panel.imshow(
                values[head].numpy(),
                cmap=DIVERGING if both else f"{DEEPER}_r" if high <= 0 else DEEPER,
                vmin=-largest if both else low,
                vmax=largest if both else high,
                interpolation="nearest",
            )
            if len(names) <= NUMBERED:
                dark = max(largest, 1e-9) * (0.7 if both else 0.55)
                number_cells(
                    panel,
                    values[head],
                    list(range(len(names))),
                    text=lambda value: f"{round(value, 1) + 0.0:.1f}",
                    is_dark=lambda value, dark=dark: abs(value) > dark,  # type: ignore[misc]
                    size=5.8,
                )
            panel.set_title(f"head {head}", loc="left", fontsize=9.5, color=INK)
            panel.set_xticks(range(len(names)), names, rotation=90, fontsize=fontsize)
            panel.set_yticks(range(len(names)), names, fontsize=fontsize)
            panel.tick_params(length=0, pad=2)
            panel.spines[:].set_visible(False)
        colour_bar(figure, image, panels.tolist(), self.what, shrink=0.75, aspect=24, pad=0.012)


@torch.no_grad()
def depends_on_text(method: EncodingMethod, spec: EncodingSpec) -> bool:
    """Try out whether what a method adds to scores depends on more than positions.

    The weights are random: those that it begins with may be such that nothing shows.
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


def _toy(words: int, longest: int) -> PreTrainedModel:
    """Build a random model of one layer whose keys are its queries: equal words attract each other."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
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
def _seen(
    model: PreTrainedModel, tokens: Int[Tensor, "1 seq"], layer: int
) -> tuple[str, Float[Tensor, "head query key"]]:
    """Return what the numbers of a layer's encoding are, and these numbers; the model is as before afterwards."""
    asked: list[tuple[Encoding, Pairs]] = []

    def record(encoding: Encoding, pairs: Pairs) -> PairScore | None:
        asked.append((encoding, pairs))
        return type(encoding).score(encoding, pairs)

    edits = Edits()
    for module in model.modules():
        if isinstance(module, Encoding):
            edits.set(module, "score", functools.partial(record, module))
    try:
        model(tokens)
    finally:
        edits.undo()
    if not 0 <= layer < len(asked):
        raise InvalidParameterError(f"There is no layer {layer}: this model has {len(asked)}, from 0 on.")
    encoding, pairs = asked[layer]
    what, values = encoding.seen(pairs)
    later = torch.ones(values.shape[2:], dtype=torch.bool).triu(1)
    return what, values[0].double().cpu().masked_fill(later, torch.nan)
