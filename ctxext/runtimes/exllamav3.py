"""What exllamav3 computes of an extended checkpoint, for the model classes that were read.

It has no setting of positions: all classes named here read ``config.json`` by one function, in the spelling of
transformers 5 or 4, whichever is there. YaRN's factor is not read: it takes the ratio of the two lengths. Of longrope
it takes one set of factors for all texts, and computes the attention factor from the lengths. It needs a GPU and was
not run; its reader and its rotary class were, without kernels (``tests/runtimes/exllamav3_numbers.py``).

Source: exllamav3 1.6.5 (model/config.py:294, util/rope.py:188-349; architecture/llama.py:46, mistral.py, mixtral.py:47,
    qwen2.py, qwen3.py:50, qwen3_moe.py:53, phi3.py:45, arcee.py:45, dots1.py:53).
"""

from __future__ import annotations

import math
from typing import ClassVar

from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import Export, ExtensionInConfig, Runtime, longest, longrope_scale_of, require_known_type
from ctxext.surgery.windows import window_of

VERSION = "1.6.5"
# Model types whose classes hand on what that function reads, to every layer.
READ = ("arcee", "dots1", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")


class Exllamav3(Runtime):
    """exllamav3, as its own ``examples/chat.py`` starts it."""

    name: ClassVar[str] = "exllamav3"
    length_flag: ClassVar[str] = "-cs"
    files_only: ClassVar[bool] = True

    def start(self, checkpoint: str, gguf: str) -> tuple[str, ...]:
        return "python", "examples/chat.py", "-m", checkpoint

    def export(self, extended: ExtensionInConfig) -> Export:
        """The size of its cache, and whether the files say the rest.

        Raises:
            IncompatibleError: if it stops on the checkpoint, or would compute other positions.
        """
        require_known_type("exllamav3", extended)
        if extended.unsaid:
            raise self.needs_files(extended)
        _refuse(extended)
        doubts = _doubts(extended)
        notes = ["config.json says it all, also after convert.py; the flag is the size of the cache.", *doubts]
        if extended.length_note:
            notes.append(extended.length_note)
        flags = (self.length_flag, str(extended.target_length))
        return Export(target=self.name, flags=flags, notes=tuple(notes), exact=not doubts)


def _refuse(extended: ExtensionInConfig) -> None:
    rope, kind = extended.rope, extended.rope_type
    if kind == "dynamic":
        raise IncompatibleError(
            f"exllamav3 {VERSION} stops on this {extended.text.model_type}: it knows no rope_type 'dynamic'. Extend it "
            f"by a static method (yarn or ntk), or serve it with transformers."
        )
    own = None
    stretch = longest(extended) / extended.trained_length
    if kind == "longrope":
        own = longrope_scale_of(longest(extended), extended.trained_length)
    elif kind == "yarn" and rope.get("attention_factor") is None:
        own = 0.1 * math.log(stretch) + 1 if stretch > 1 else 1.0
    if own is not None and abs(own - extended.scale) > 1e-3:
        raise IncompatibleError(
            f"exllamav3 {VERSION} would run this {extended.text.model_type} with another attention factor: {own:.6g}, "
            f"which it takes from the two lengths, and not {extended.scale:.6g}. Extend it by a method without one of "
            f"its own (yarn, pi, ntk), or serve it with transformers."
        )


def _doubts(extended: ExtensionInConfig) -> list[str]:
    """Why it is not exact, or not known to be."""
    rope, found = extended.rope, []
    if extended.rope_type == "yarn":
        stretch = longest(extended) / extended.trained_length
        if abs(stretch / rope["factor"] - 1) > 1e-6:
            found.append(
                f"exllamav3 takes YaRN's factor from the two lengths, {stretch:.6g}, and not {rope['factor']:.6g}."
            )
    if extended.rope_type == "longrope" and rope["short_factor"] != rope["long_factor"]:
        found.append("exllamav3 takes long_factor for every text, short ones included.")
    if extended.config.model_type not in READ or extended.layer_type is not None:
        return [*found, f"Not proven: what exllamav3 {VERSION} does for a {extended.config.model_type} was not read."]
    window = window_of(extended.text)
    if window and window < extended.target_length:
        found.append(f"exllamav3 {VERSION} has no sliding window here: it attends beyond the {window} tokens.")
    return found
