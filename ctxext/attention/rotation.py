"""Find out how a model rotates its heads: which dimensions, in which pairs, which way round."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.attention.attend import LayerCall, decoder_of, install_attention, put_in_evaluation
from ctxext.caches.digest import is_fsdp
from ctxext.core.edits import Edits
from ctxext.core.rebuild import FAILURES, Rebuild
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.kernels.pieces import RotationForm, Turn
from ctxext.methods.remap import PositionMap
from ctxext.probe.replaced import original_code, replaced_in
from ctxext.rotary.sites import RotarySite

FAR = 5  # a position at which slow frequencies rotate measurably, and the fastest by more than half a turn
# As transformers has them; until 5.16 the last one also puts the axes of Qwen2-VL together.
ROTATING = (
    *("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"),
    "apply_multimodal_rotary_pos_emb",
)
ROTATION_ERROR = 0.05  # bfloat16 rounds by less than 0.01; a wrong layout is off by about 1


class _Seen(Exception):
    """Signal that ends a forward pass once its first queries are known."""

    def __init__(self, queries: Tensor) -> None:
        super().__init__()
        self.queries = queries


def _show_queries(layer: LayerCall) -> Tensor:
    """Raise ``_Seen`` with the queries of the first layer, instead of computing its attention."""
    raise _Seen(layer.q.detach())


def rotation_form(
    subject: Subject,
    site: RotarySite,
    inv_freq: Float[Tensor, " pairs"],
    far: Collection[str],
    left: Collection[str],
    refusal: str,
) -> RotationForm:
    """Return how the dimensions of a head rotate, from queries of one token at two positions.

    Args:
        inv_freq: frequencies that the layers rotate by, float64, radians per token.
        far: paths of the layers that rotate so, below the decoder.
        left: paths of the other layers, which keep their attention.

    Raises:
        IncompatibleError: if no rotation by the model's frequencies maps the one query to the other.
    """
    decoder = decoder_of(subject, site)
    # Weights may be offloaded, sharded or on the meta device, or not yet on the device of another program's kernels.
    out_of_reach = any(weight.is_meta or not weight.numel() for weight in decoder.parameters())
    # FSDP gathers weights for a whole pass: it takes the first module that runs for the outermost one, and a pass that
    # ends in the middle leaves them gathered.
    out_of_reach |= is_fsdp(decoder)
    first = decoder.get_submodule(next(iter(far)))
    queries, tails = None, [False, True]
    if not out_of_reach and not replaced_in(type(first).__module__):
        with Edits() as trial:
            install_attention(subject, site, dict.fromkeys(far, _show_queries), trial, left=left)
            put_in_evaluation(decoder, trial)  # dropout would tell two queries of one token apart
            queries = _queries_of(decoder, subject.ordinary_tokens)
            trial.undo()
    if queries is None:
        queries, tails = _rotated_by_code(subject, site, first, refusal), [hasattr(subject.text, "qk_rope_head_dim")]
    queries = queries.cpu().double()
    still, moved = queries[:, :, :1], queries[:, :, 1:]
    start = torch.zeros(1, 1, dtype=torch.long)
    errors = {}
    for form in itertools.starmap(RotationForm, itertools.product((False, True), tails, (False, True))):
        moving = Turn(PositionMap(offset=float(FAR)), start, inv_freq, form=form, dtype=torch.float64)
        errors[form] = float((moving(still, (0, 1), (0, 1)) - moved).norm() / still.norm())
    best = min(errors, key=lambda form: errors[form])
    if not errors[best] < ROTATION_ERROR:
        raise IncompatibleError(
            f"{refusal}: no rotation in halves or in pairs maps a token's query at one position to its query at "
            f"another. They differ by {errors[best]:.2g} of their size, so attention cannot change such positions."
        )
    return best


def _rotated_by_code(subject: Subject, site: RotarySite, layer: nn.Module, refusal: str) -> Tensor:
    """Rotate one vector to positions 0 and ``FAR`` by the function of the model's module that rotates.

    This serves models whose weights are not in memory, or whose code another program replaced by kernels.

    Raises:
        IncompatibleError: if the model's module has no such function.
    """
    code = original_code(type(layer).__module__)
    rotate = next((code[name] for name in ROTATING if name in code), None)
    vector = torch.randn(site.spec.rotary_dim, generator=torch.Generator().manual_seed(0)).expand(1, 1, 2, -1)
    try:
        with torch.device("cpu"), torch.no_grad():
            cos, sin = (part[None] for part in site.output(Rebuild(subject).rotary(site.path), torch.tensor([0, FAR])))
            takes = [*inspect.signature(rotate).parameters]  # type: ignore[arg-type]
            angles = (torch.complex(cos, sin),) if "freqs_cis" in takes else (cos, sin)
            if "mrope_section" in takes:
                axes = (part.expand(3, *part.shape) for part in angles)
                angles = (*axes, subject.text.rope_parameters["mrope_section"])
            if takes[1:2] == ["cos"]:  # one tensor at a time
                return rotate(vector, *angles)  # type: ignore[misc, no-any-return]
            rotated: Tensor = rotate(vector, vector, *angles)[0]  # type: ignore[misc]
    except FAILURES as error:
        raise IncompatibleError(
            f"{refusal}: ctxext has to run its first layer, and some weights are offloaded, sharded or not loaded. "
            f"Patch the model before that. ({type(error).__name__}: {error})"
        ) from error
    return rotated


def _queries_of(decoder: nn.Module, known: Int[Tensor, " tokens"]) -> Tensor | None:
    """Return queries of the first remapped layer for one token at positions 0 and ``FAR``, ``[1, heads, 2, head_dim]``.

    Of eight tokens, each a text by itself, the one with the largest queries: in layers before that one a token then
    sees itself alone. Return None if the decoder does not run on positions, or its queries are zero.
    """
    device = next(decoder.parameters()).device
    tried = known[:: max(1, len(known) // 8)][:8] if len(known) else torch.ones(1, dtype=torch.long)
    places = torch.tensor([0, FAR], device=device).repeat_interleave(len(tried))[:, None]
    try:
        with torch.no_grad():
            decoder(input_ids=tried.repeat(2)[:, None].to(device), position_ids=places, use_cache=False)
    except _Seen as seen:
        pairs = seen.queries.reshape(2, len(tried), *seen.queries.shape[1:])  # [position, token, heads, 1, head_dim]
        sizes = pairs[0].cpu().double().flatten(1).norm(dim=1).nan_to_num(nan=0.0)
        largest = int(sizes.argmax())
        return pairs[:, largest].permute(2, 1, 0, 3) if sizes[largest] > 0 else None
    except FAILURES:
        return None
    raise IncompatibleError(f"{type(decoder).__name__} ran without calling the attention interface of transformers.")
