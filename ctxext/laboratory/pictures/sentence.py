"""Scores and counts that an encoding makes of a text, for each query and key, where they depend on the text."""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ctxext.core.edits import Edits
from ctxext.core.patching import patch
from ctxext.errors import InvalidParameterError
from ctxext.evaluation.report.figures import Panel
from ctxext.laboratory.pictures.bias import pairs_at
from ctxext.laboratory.pictures.picture import DEEPER, DIVERGING, Picture, heat
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.measuring.forward import check_known
from ctxext.methods import Method
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec, Pairs, Weighting

SENTENCE = "the cat saw the dog . the dog saw a cat . the cat ran"
MOST_TOKENS = 48  # more have no room for their names
SHOWN = 2  # heads that stand side by side, so that the number of each cell can be read
NUMBERED = 18  # tokens up to which cells are large enough to hold their number


def sentence_asked(method: Method | None, request: PictureRequest) -> Picture | None:
    """Return the picture of an encoding that depends on the text, one matrix per head; None for another method.

    Raises:
        InvalidParameterError: no text, or one that is too long to be drawn; or a layer that there is not.
    """
    if not isinstance(method, EncodingMethod) or not depends_on_text(method, SMALL):
        return None
    # Weights that no checkpoint gives are drawn at random: with one seed the picture is the same every time.
    torch.manual_seed(0)
    if request.checkpoint is None:
        names = (request.text or SENTENCE).split()
        if not names:
            raise InvalidParameterError("--text holds no word. Give a sentence.")
        words = list(dict.fromkeys(names))
        model = patch(_toy(len(words), request.trained_length or 64), method)
        tokens = torch.tensor([[words.index(name) for name in names]])
        place = "an untrained toy in which equal words attract"
    else:
        model, method, state = request.load_encoded(method)
        tokens, tokenizer = request.tokens(request.text or SENTENCE)
        check_known(model, tokens)
        pieces = tokenizer.convert_ids_to_tokens(tokens[0].tolist())
        names = [piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "⏎").strip() or "·" for piece in pieces]
        place = request.model + (f", {state}" if state else "")
    if len(names) > MOST_TOKENS:
        raise InvalidParameterError(
            f"The text has {len(names)} tokens, and a picture has room for the names of {MOST_TOKENS}. Give a "
            f"shorter one."
        )
    what, values = _seen(model, tokens, request.layer)
    shown = {"what": what, "layer": request.layer, "tokens": names, "values": values}
    return Picture(
        kind="sentence",
        sentence=f"{method.name}: {what}, in layer {request.layer} of {place}",
        caption="Queries down, keys across. Each row is what one token, when it reads, is told of all tokens before "
        "it.",
        values={"method": method.to_dict(), **shown},
        panels=_panels(names, values[:SHOWN], what),
    )


def _panels(tokens: list[str], values: Float[Tensor, "head query key"], what: str) -> list[Panel]:
    """Return a matrix for each head."""
    known = values[~values.isnan()]
    low, high = min(float(known.min()), 0.0), max(float(known.max()), 0.0)
    both, largest, side = low < 0 < high, max(-low, high), min(max(3.0, 0.27 * len(tokens)), 4.6)
    names = [token if len(token) <= 12 else f"{token[:11]}…" for token in tokens]
    dark = max(largest, 1e-9) * (0.7 if both else 0.55)

    def then(axes: Any) -> None:
        fontsize = 7.5 if len(names) <= 24 else 5
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=fontsize)
        axes.set_yticks(range(len(names)), names, fontsize=fontsize)

    return [
        heat(
            f"head {head}",
            matrix,
            size=(max(side + 1.0, 4.0), side + 0.8),
            shades=DIVERGING if both else f"{DEEPER}_r" if high <= 0 else DEEPER,
            scale=(-largest, largest) if both else (low, high),
            bar={"label": what, "shrink": 0.75, "aspect": 24} if head == len(values) - 1 else None,
            panels=len(values),
            cells=("z.1f", dark, 5.8) if len(names) <= NUMBERED else None,
            then=then,
        )
        for head, matrix in enumerate(values)
    ]


@torch.no_grad()
def depends_on_text(method: EncodingMethod, spec: EncodingSpec) -> bool:
    """Try out whether what a method adds to scores depends on more than positions.

    The weights are random, since the weights that a method begins with may hide the dependence.
    """
    if method.form != "scores":
        return method.form == "attention"
    encoding, generator = method.build(spec), torch.Generator().manual_seed(0)
    for weight in encoding.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    if method.carries:
        return True
    distances = torch.arange(8)
    scores = [encoding.score(pairs_at(spec, 7, distances, seed=seed)) for seed in (1, 2)]
    first, second = (score.seen()[1] for score in scores if score is not None)
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

    def record(encoding: Encoding, pairs: Pairs) -> Weighting | None:
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
