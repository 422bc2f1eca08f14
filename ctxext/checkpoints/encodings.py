"""The weights of encodings in files: by their names in a model that has no adapters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from ctxext.methods.encoding import Encoding

# PEFT's names (0.21.2, utils/other.py) for what stands behind one of its wrappers, and for the copies of each adapter.
BEHIND = ("original_module", "base_layer")
COPIES = "modules_to_save"


def encoding_weights(model: nn.Module, adapter: str | None = None) -> dict[str, Tensor]:
    """Return the weights of the encodings on a model, by their names in its ``state_dict`` as if it had no adapters.

    Args:
        adapter: name of an adapter; the encodings that it holds copies of (``modules_to_save``) are left out.
    """
    weights: dict[str, Tensor] = {}
    copied = {name for name, _, holder in _encodings(model) if holder is not None and holder == adapter}
    for name, encoding, holder in _encodings(model):
        if holder is None and name not in copied:
            weights |= {f"{name}.{key}": weight for key, weight in encoding.state_dict(keep_vars=True).items()}
    return weights


def _encodings(model: nn.Module) -> Iterator[tuple[str, Encoding, str | None]]:
    """Yield each encoding with its name as if there were no adapters, and the adapter whose copy it is."""
    for path, module in model.named_modules():
        if isinstance(module, Encoding):
            parts, holder = path.split("."), None
            if COPIES in parts:
                at = parts.index(COPIES)
                holder = parts[at + 1]
                del parts[at : at + 2]
            yield ".".join(part for part in parts if part not in BEHIND), module, holder
