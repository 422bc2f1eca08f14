"""Sliding windows of a config: apply the user's choice and describe the windows that remain."""

from __future__ import annotations

from typing import Any

from ctxext.core.scaling import all_windowed, is_windowed, layer_types, stated_window
from ctxext.errors import IncompatibleError
from ctxext.files import JsonObject
from ctxext.methods.parameters import require


def window_fields(config: Any, choice: str | None, target_length: int | None) -> JsonObject:
    """Return the config fields that the user's choice for sliding windows changes.

    ``choice`` is the ``sliding_window`` of ``ctxext.patch``. ``target_length`` is None if unknown, so that any window
    may be too narrow.

    Raises:
        IncompatibleError: if every attention layer has a window narrower than the extension, and the user made
            no choice.
        InvalidParameterError: if the choice is unknown.
    """
    require(choice in (None, "keep", "lift"), "sliding_window", choice, "'keep' or 'lift' (or left out)")
    window = stated_window(config)
    if window is None or not all_windowed(config):
        if choice == "lift":
            raise IncompatibleError(
                f"sliding_window='lift': this {config.model_type} has full-attention layers, which already see the "
                f"whole text. Leave sliding_window out."
            )
        return {}
    if choice is None and not _reaches(window, target_length):
        extension = "any extension" if target_length is None else f"an extension to {target_length} tokens"
        raise IncompatibleError(
            f"Every attention layer of this {config.model_type} sees only the last {window} tokens "
            f"(sliding_window={window}), which would limit the reach of {extension}. Pass sliding_window='lift' "
            f"(--sliding-window lift) if the weights were trained without a window or will be fine-tuned. Pass "
            f"sliding_window='keep' (--sliding-window keep) to keep it."
        )
    if choice != "lift":
        return {}
    fields: JsonObject = {"sliding_window": None}
    if any(map(is_windowed, layer_types(config))):
        # layer_types decide then, and transformers may require a number of tokens for the window.
        kinds = ["full_attention" if is_windowed(kind) else kind for kind in config.layer_types]
        fields = {"layer_types": kinds}
    if hasattr(config, "use_sliding_window"):
        fields |= {"use_sliding_window": False, "sliding_window": None}  # vLLM reads the number alone
    return fields


def window_note(config: Any, target_length: int | None) -> str | None:
    """Return a sentence about windows that stay, None if there are none; arguments as for ``window_fields``."""
    window = stated_window(config)
    if window is None:
        return None
    if all_windowed(config) and _reaches(window, target_length):
        return f"Every attention layer sees the last {window} tokens, enough for a text of {target_length} tokens."
    if all_windowed(config):
        return f"Every attention layer still sees only the last {window} tokens (sliding_window='keep')."
    if not any(map(is_windowed, layer_types(config))):
        return None
    return f"Some layers are sliding windows of {window} tokens by design; the full-attention layers carry the reach."


def window_of(config: Any) -> int | None:
    """Return the number of tokens in the window of layers that have one; None if no layer has one."""
    kinds = layer_types(config)
    has_window = not kinds or any(is_windowed(kind) or kind == "attention" for kind in kinds)
    return stated_window(config) if has_window else None


def _reaches(window: int, target_length: int | None) -> bool:
    """Return whether the last token of a text of this length sees the first one."""
    return target_length is not None and window >= target_length
