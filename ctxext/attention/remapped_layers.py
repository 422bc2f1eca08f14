"""Choose the layers of a model whose positions are remapped, and install attention in pieces in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ctxext.attention.attend import (
    KNOWN_ARGUMENTS,
    Backends,
    Tried,
    TriedLayer,
    decoder_of,
    install_attention,
    refuse_shared_heads,
    require_float64,
    try_install,
    why_no_layer_attends_by_layout,
)
from ctxext.attention.engines import RemapAttend
from ctxext.attention.remap import HeadPieces
from ctxext.attention.rotation import rotation_form
from ctxext.attention.split_heads import Groups
from ctxext.core.edits import Edits
from ctxext.core.rebuild import Rebuild, built_module
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError
from ctxext.methods.remap import Piece, RemapMethod
from ctxext.methods.retrieval_heads import RetrievalHeads
from ctxext.probe.layers import Layers
from ctxext.rotary.sites import RotaryPlace, RotarySite

OWN_ARGUMENTS = frozenset({"s_aux", "softcap"})
"""Further arguments that attention in pieces takes."""


def require_remappable(
    subject: Subject, method: RemapMethod, site: RotarySite, places: list[RotaryPlace], layers: Layers
) -> tuple[Piece, ...]:
    """Return the method's pieces if they can replace attention of the model.

    Raises:
        IncompatibleError: if they cannot; the message has the reason.
        InvalidParameterError: if the method's parameters do not fit the model.
    """
    if isinstance(method, RetrievalHeads):
        refuse_shared_heads(subject, method)
    if reason := why_no_layer_attends_by_layout(subject, places, layers):
        raise IncompatibleError(f"{_refusal(subject.text, method)}: {reason}.")
    return method.pieces(site.spec, method.target_length(site.spec.trained_length))


def _refusal(text: Any, method: RemapMethod) -> str:
    return f"Method {method.name!r} cannot replace the attention of this {text.model_type}"


@dataclass(frozen=True)
class Share:
    """The attention layers of a model, by what remapping does with them.

    Args:
        far: layers that reach beyond any window and rotate, by their paths below the decoder; they are remapped.
        left: the other layers, with the reason for which they stay as they are.
    """

    far: Mapping[str, TriedLayer]
    left: Mapping[str, str]

    @classmethod
    def of(cls, decoder: str, tried: Tried, seen: Layers, trained_length: int) -> Share:
        """Sort the attention layers below ``decoder``, by the masks that they got and by the probe of the rotations.

        Raises:
            IncompatibleError: if a layer that reaches far cannot be remapped, or none is there; the message is the
                reason.
        """
        above = f"{decoder}." if decoder else ""
        far, left = dict[str, TriedLayer](), dict[str, str]()
        for path, layer in tried.layers.items():
            # In this order: what does not rotate, or sees a window only, is left alone, whatever else it computes.
            window, unknown = layer.window, layer.arguments - KNOWN_ARGUMENTS - OWN_ARGUMENTS
            if layer.crosses:
                left[path] = "the text of an encoder"
            elif not any(f"{above}{path}.".startswith(f"{block}.") for block in seen.rotating):
                left[path] = "no positions"
            elif window is not None and window <= trained_length:
                left[path] = f"a window of {window:,} tokens"
            elif window is not None:
                raise IncompatibleError(f"the window of {path} is wider ({window:,}) than its trained length")
            elif layer.mask.refusal:
                raise IncompatibleError(layer.mask.refusal.rstrip("."))
            elif unknown:
                raise IncompatibleError(f"{path} computes with {min(unknown)}, which attention in pieces does not know")
            else:
                far[path] = layer
        inside = [f"{above}{path}." for path, layer in tried.layers.items() if not layer.crosses]
        uncovered = [
            block for block in sorted(seen.rotating) if not any(path.startswith(f"{block}.") for path in inside)
        ]
        if uncovered:
            raise IncompatibleError(f"{uncovered[0]} rotates outside of transformers' attention interface")
        if not far:
            raise IncompatibleError(
                "every layer has a sliding window, so there are no long distances to remap. Remove the window with "
                "sliding_window='lift' (--sliding-window lift)"
            )
        return cls(far, left)

    @property
    def reads_keys_once(self) -> bool:
        """True if no keys are read by a second call or layer after the one that may drop some."""
        calls = sum(layer.calls for layer in self.far.values())
        return calls == len({id(layer.keys) for layer in self.far.values()})

    def notes(self) -> tuple[str, ...]:
        """Return the note for a user about layers that stay as they are; none if all are remapped."""
        if not self.left:
            return ()
        counts = Counter(self.left.values())
        which = ", ".join(f"{count} with {reason}" for reason, count in counts.items())
        total = len(self.far) + len(self.left)
        return (f"{len(self.far)} of {total} attention layers are remapped; the others stay as they are: {which}.",)


def install_pieces(
    subject: Subject,
    method: RemapMethod,
    site: RotarySite,
    seen: Layers,
    rebuild: Rebuild,
    backend: str,
    edits: Edits,
) -> tuple[str, ...]:
    """Make the layers of an extended model that reach far attend in the pieces of ``method``; return notes for a user.

    Raises:
        IncompatibleError: if its layers do not use the attention interface, or rotate in an unknown way.
    """
    require_float64(subject.model.device)
    refusal = _refusal(rebuild.text, method)
    tried = try_install(rebuild, site)
    if tried.failure:
        raise IncompatibleError(f"{refusal}: {tried.failure}.")
    try:
        share = Share.of(site.path.rpartition(".")[0], tried, seen, site.spec.trained_length)
    except IncompatibleError as error:
        raise IncompatibleError(f"{refusal}: {error}.") from None
    sees_both_ways = any(layer.sees_both_ways for layer in share.far.values())
    if sees_both_ways and isinstance(method, RetrievalHeads):
        raise IncompatibleError(
            f"{refusal}: its tokens see later ones. Heads retrieve where a model predicts the next token; for tokens "
            f"that see both ways, take self_extend."
        )
    far = HeadPieces.of(method, site.spec, both_ways=sees_both_ways)
    decoder, own = decoder_of(subject, site), subject.text._attn_implementation
    implementation = tried.implementation(own)
    # One compressed vector of a token serves all heads of such a layer, in the cache too.
    is_latent = any(getattr(built_module(decoder, path), "kv_lora_rank", None) is not None for path in share.far)
    attend = RemapAttend(
        method=method,
        far=far,
        form=rotation_form(subject, site, far.inv_freq(torch.device("cpu")), share.far, share.left, refusal),
        backends=Backends(backend),
        implementation=implementation,
        drops=share.reads_keys_once and not is_latent,
    )
    if isinstance(method, RetrievalHeads):
        groups, near = Groups.of(method, tried, share.far), HeadPieces.of(method.near_method, site.spec)
        by_layer: Mapping[str, Any] = groups.attends(attend, near)
        notes = groups.notes(attend, near)
    else:
        by_layer, notes = dict.fromkeys(share.far, attend), attend.far.notes(drops=attend.drops)
    if is_latent and (far.reach or isinstance(method, RetrievalHeads)):
        notes += ("The cache holds all tokens: in latent attention one vector of a token serves all heads.",)
    install_attention(subject, site, by_layer, edits, left=share.left, implementation=implementation)
    exact, capped = attend.exact_length, "" if implementation == own else f", but under the soft cap that {own} drops"
    first = (f"Texts of up to {exact:,} tokens are read as without the extension{capped}.",) if exact else ()
    return (*first, *share.notes(), *notes)
