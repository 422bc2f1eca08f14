"""Export for exllamav3, known from its source for the model classes named here.

exllamav3 has no setting of positions: all classes named here read ``config.json`` by one function, in the spelling of
transformers 5 or 4. It ignores YaRN's factor and takes the ratio of the two lengths. For longrope it takes one set of
factors for all texts, and computes the attention factor from the lengths. exllamav3 needs a GPU and was not run; its
config reader and its rotary class were, without kernels (``tests/runtimes/exllamav3_numbers.py``).

Source: exllamav3 1.6.5 (model/config.py:294, util/rope.py:188-349; architecture/llama.py:46, mistral.py, mixtral.py:47,
    qwen2.py, qwen3.py:50, qwen3_moe.py:53, phi3.py:45, arcee.py:45, dots1.py:53).
"""

from __future__ import annotations

import math
from typing import ClassVar

from ctxext.core.windows import window_of
from ctxext.errors import IncompatibleError
from ctxext.runtimes.base import Export, ExtensionInConfig, Runtime, longest, longrope_scale_of, require_known_type

VERSION = "1.6.5"
# Model types whose classes pass the result of that function on to every layer.
READ = ("arcee", "dots1", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe")


class Exllamav3(Runtime):
    """exllamav3, as ``examples/chat.py`` of its repository starts it."""

    name: ClassVar[str] = "exllamav3"
    length_flag: ClassVar[str] = "-cs"
    files_only: ClassVar[bool] = True

    def start(self, checkpoint: str, gguf: str) -> tuple[str, ...]:
        return "python", "examples/chat.py", "-m", checkpoint

    def export(self, extended: ExtensionInConfig) -> Export:
        """Return the flag for the size of its cache; the files hold the rest.

        Raises:
            IncompatibleError: if exllamav3 stops on the checkpoint, or would compute other positions.
        """
        require_known_type("exllamav3", extended)
        if extended.unsaid:
            raise self.needs_files(extended)
        _refuse(extended)
        doubts = _doubts(extended)
        notes = ["config.json is enough, also after convert.py; the flag is the size of the cache.", *doubts]
        if extended.length_note:
            notes.append(extended.length_note)
        flags = (self.length_flag, str(extended.target_length))
        return Export(target=self.name, flags=flags, notes=tuple(notes), exact=not doubts)


def _refuse(extended: ExtensionInConfig) -> None:
    rope, kind = extended.rope, extended.rope_type
    if kind == "dynamic":
        raise IncompatibleError(
            f"exllamav3 {VERSION} stops on this {extended.text.model_type}: rope_type 'dynamic' is unknown to it. "
            f"Extend the checkpoint by a static method (yarn or ntk), or serve it with ctxext serve."
        )
    computed = None
    stretch = longest(extended) / extended.trained_length
    if kind == "longrope":
        computed = longrope_scale_of(longest(extended), extended.trained_length)
    elif kind == "yarn" and rope.get("attention_factor") is None:
        computed = 0.1 * math.log(stretch) + 1 if stretch > 1 else 1.0
    if computed is not None and abs(computed - extended.scale) > 1e-3:
        raise IncompatibleError(
            f"exllamav3 {VERSION} would run this {extended.text.model_type} with another attention factor: "
            f"{computed:.6g} from the two lengths, and not {extended.scale:.6g}. Extend the checkpoint by a method "
            f"without a factor of its own (yarn, pi, ntk), or serve it with ctxext serve."
        )


def _doubts(extended: ExtensionInConfig) -> list[str]:
    """Return the reasons why exllamav3 is not exact, or not known to be."""
    rope, doubts = extended.rope, []
    if extended.rope_type == "yarn":
        stretch = longest(extended) / extended.trained_length
        if abs(stretch / rope["factor"] - 1) > 1e-6:
            doubts.append(
                f"exllamav3 takes YaRN's factor from the two lengths, {stretch:.6g}, and not {rope['factor']:.6g}."
            )
    if extended.rope_type == "longrope" and rope["short_factor"] != rope["long_factor"]:
        doubts.append("exllamav3 takes long_factor for every text, short ones included.")
    if extended.config.model_type not in READ or extended.layer_type is not None:
        return [*doubts, f"Not proven: exllamav3 {VERSION}'s code for a {extended.config.model_type} was not read."]
    window = window_of(extended.text)
    if window and window < extended.target_length:
        doubts.append(f"exllamav3 {VERSION} has no sliding window here: it attends beyond the {window} tokens.")
    return doubts
