"""Data types shared by the runtime exporters."""

from __future__ import annotations

import copy
import functools
import json
import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ctxext.core.subject import path_to, text_of
from ctxext.errors import IncompatibleError
from ctxext.files import JsonObject
from ctxext.methods.formulas import NEVER, as_longrope
from ctxext.methods.yarn import YaRN
from ctxext.models.windows import window_of
from ctxext.rotary.sites import SCALING_KEYS
from ctxext.spec import Frequencies, RopeSpec

CLOSE = 1e-3
"""Tolerance, relative to the effect of the extension; float32 rounding is 20 times smaller."""
USUAL_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""YaRN's defaults for keys that a config leaves out."""
STOCK_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@functools.cache
def read_table(path: Path) -> JsonObject:
    """Read a runtime's table of measurements, one entry per model type, written by a script."""
    table: JsonObject = json.loads(path.read_text())
    return table


@dataclass(frozen=True, kw_only=True)
class Export:
    """Flags that make another runtime serve an extension.

    Args:
        exact: True if the target is known to compute the same positions as the model patched in place, at every
            length; if not, a note gives the reason.
        in_file: True if the flags are for a GGUF file that holds the extension, as ``export(gguf=...)`` writes it.
        start: the command that serves the checkpoint without an extension, word by word; as a runtime returns it, the
            words before the checkpoint, or none for its usual ones.
        first: the command that writes the checkpoint to be served, word by word; none where it exists.
        config_sha256: first 12 hexadecimal digits of the hash of the ``config.json`` that the flags were computed for,
            empty without such a file.
    """

    target: str
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()
    exact: bool = True
    in_file: bool = False
    file: str | None = None
    start: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    config_sha256: str = ""

    @property
    def command(self) -> str:
        """The whole command that serves the extended checkpoint, ready to paste."""
        commands = (self.first, (*self.start, *self.flags))
        return " && ".join(shlex.join(words) for words in commands if words)

    @property
    def by_flag(self) -> dict[str, str]:
        """Values by flag."""
        return dict(zip(self.flags[::2], self.flags[1::2], strict=True))

    def __str__(self) -> str:
        same = "the same positions as in transformers" if self.exact else "not the same positions, or not proven"
        wrote = [f"wrote {self.file}"] if self.file is not None else []
        read = f"computed for the config.json of SHA-256 {self.config_sha256}...; export again when it changes"
        notes = (*self.notes, read) if self.config_sha256 else self.notes
        return "\n  ".join([self.command, *wrote, same, *(f"- {note}" for note in notes)])

    @property
    def told(self) -> str:
        """Flags in one line of a shell, with the file they are for if not every file of the model will do."""
        flags = shlex.join(self.flags) or "no flags, its files say it all"
        return f"{flags} (with a GGUF file that ctxext export --gguf writes)" if self.in_file else flags


@dataclass(frozen=True, kw_only=True)
class OwnALiBi:
    """A model that was trained with ALiBi and keeps its slopes when it is extended."""

    model_type: str
    target_length: int
    unsaid: JsonObject


@dataclass(frozen=True, kw_only=True)
class ExtensionInConfig:
    """An extension as a config describes it, whatever program wrote the config.

    Args:
        layer_type: the layer type whose positions were extended; None where all layers share positions.
        trained_length: tokens before the extension, where the config gives them.
        windows: lengths that the weights may have been trained for, where the config leaves that open.
        unsaid: config fields that the files to be served do not hold yet.
        files: Rope dict in those files; empty where they hold the extended one.
        guarded: True if those files stop programs that read the fields of transformers 4, or lack these.
        way_to_run: the way to run the checkpoint that is left where no runtime can.
    """

    config: Any
    layer_type: str | None
    trained_length: int
    target_length: int
    scale: float
    unsaid: JsonObject
    windows: tuple[int, ...] = ()
    files: JsonObject = field(default_factory=dict)
    guarded: bool = False
    pairs: int | None = None
    way_to_run: str = "Serve it with ctxext serve"

    @property
    def text(self) -> Any:
        """Part of the config that describes the decoder."""
        return text_of(self.config)

    @property
    def rope(self) -> JsonObject:
        """Rope dict that was extended."""
        rope = dict(self._stored_rope)
        if "factor" in rope and rope["factor"] is None:  # transformers then takes the ratio of the lengths
            rope["factor"] = self.target_length / self.trained_length
        return rope

    @property
    def _stored_rope(self) -> JsonObject:
        parameters: JsonObject = self.text.rope_parameters
        return parameters if self.layer_type is None else dict(parameters[self.layer_type])

    @property
    def leaves_factor_open(self) -> bool:
        """True for YaRN with a factor of null, which only transformers fills in."""
        return self.rope_type == "yarn" and self._stored_rope.get("factor") is None

    @property
    def rope_type(self) -> str:
        """Name of the scaling in the config."""
        return str(self.rope.get("rope_type", "default")).partition(":")[0]  # ctxext's types end in a sentence

    @property
    def stock(self) -> bool:
        """True if plain transformers knows the rope type."""
        return self.rope_type in STOCK_TYPES

    @property
    def length_notes(self) -> list[str]:
        """Note about the length to serve; none if the config leaves no doubt."""
        note = (
            f"This config does not say which length its weights were trained for: "
            f"{' or '.join(map(str, self.windows))} tokens. Runtimes take {self.target_length}; "
            f"serve less if the weights were trained for less."
        )
        return [note] if self.windows else []

    @property
    def loses_factor(self) -> bool:
        """True if no runtime here reads the factor."""
        return self.rope_type == "proportional" and self.rope.get("factor", 1.0) != 1.0

    @property
    def scales_scores(self) -> bool:
        """True if YaRN's temperature multiplies whole scores of latent attention instead of cos and sin."""
        return bool(self.rope.get("mscale_all_dim")) and hasattr(self.text, "kv_lora_rank")

    @property
    def has_two_sets(self) -> bool:
        """True for longrope with other frequencies in short texts than in long ones."""
        return self.rope_type == "longrope" and bool(self.rope["short_factor"] != self.rope["long_factor"])

    @property
    def yarn_scale(self) -> float:
        """Factor on cos and sin that YaRN has by default, by the factor of the scaling."""
        return 0.1 * math.log(self.rope["factor"]) + 1

    @property
    def narrow_window(self) -> int | None:
        """Tokens of a sliding window that the text to serve exceeds; None without one."""
        window = window_of(self.text)
        return window if window and window < self.target_length else None

    @property
    def method(self) -> str:
        """Name of the method, or the rope type where ctxext did not make the extension."""
        saved = getattr(self.config, "ctxext", None)
        return str(saved["method"]["method"]) if saved else self.rope_type


class Runtime(ABC):
    """A program that serves checkpoints.

    Attributes:
        name: name for ``ctxext.export``.
        start: The command that serves a checkpoint, without its name and the flags of an export.
        reads_gguf: True if that name is a GGUF file's.
        length_flag: the argument that sets the longest text; None if there is none.
        drafts: The program's use of draft heads, behind "MTP draft heads (1): ".
        drafts_missed: The loss where arguments extend the model and not its draft heads; empty if they reach both.
    """

    name: ClassVar[str]
    start: ClassVar[tuple[str, ...]]
    reads_gguf: ClassVar[bool] = False
    length_flag: ClassVar[str | None]
    drafts: ClassVar[str]
    drafts_missed: ClassVar[str] = ""

    @abstractmethod
    def export(self, extended: ExtensionInConfig) -> Export:
        """Return the flags that serve an extension of rotary positions.

        Raises:
            IncompatibleError: if the runtime cannot run the extension, or would silently compute something else.
        """

    def serving(self, extended: ExtensionInConfig | OwnALiBi, *flags: str, notes: Iterable[str], **more: Any) -> Export:
        """Return an export with these flags, and the one that sets the longest text; ``more`` are its other fields."""
        length = () if self.length_flag is None else (self.length_flag, str(extended.target_length))
        return Export(target=self.name, flags=(*flags, *length), notes=tuple(notes), **more)

    def needs_copy(self, config: Any) -> bool:
        """Return whether only the files of a copy can tell the program of the extension in ``config``."""
        return False

    def export_own_alibi(self, extended: OwnALiBi) -> Export:
        """Return the flags that serve a model trained with ALiBi, which keeps its slopes.

        Raises:
            IncompatibleError: unless the runtime is known to compute the same slopes; most are not.
        """
        raise IncompatibleError(
            f"{self.name} was not seen to run the ALiBi of a {extended.model_type}. Serve it with vLLM or llama.cpp "
            f"where they have it, or with `ctxext serve`."
        )


def with_whole_table(extended: ExtensionInConfig) -> ExtensionInConfig:
    """Rewrite as longrope what gets an endless table of positions in vLLM and SGLang, or one that ends too early.

    Their tables for linear and yarn have factor times the length rows (vLLM: _compute_cos_sin_cache): too many where
    the factor stops all rotation, too few where yarn's divisor is below the stretch of the text.
    """
    rope, kind, trained = extended.rope, extended.rope_type, extended.trained_length
    ends_early = kind == "yarn" and math.ceil(trained * rope["factor"]) < extended.target_length
    if extended.pairs is None or not (ends_early or (kind == "linear" and rope["factor"] >= NEVER)):
        return extended
    spec = RopeSpec(rotary_dim=2 * extended.pairs, base=rope["rope_theta"], trained_length=trained)
    inv_freq = torch.zeros(extended.pairs, dtype=torch.float64)
    if ends_early:
        read = {name: rope[name] for name in ("factor", *USUAL_YARN) if rope.get(name) is not None}
        inv_freq = YaRN(**read).frequencies(spec, trained).inv_freq
    form = as_longrope(spec, Frequencies(inv_freq, extended.scale), extended.target_length / trained)
    parameters = whole(extended, {key: value for key, value in rope.items() if key not in SCALING_KEYS} | form)
    changed = replace(extended, config=copy.deepcopy(extended.config))
    changed.text.rope_parameters = parameters
    return replace(changed, unsaid=extended.unsaid | {"rope_parameters": parameters})


def require_known_type(runtime: str, extended: ExtensionInConfig) -> None:
    """Refuse every rope type that plain transformers does not know.

    Raises:
        IncompatibleError: if the config holds another rope type.
    """
    if not extended.stock:
        raise IncompatibleError(
            f"{runtime} cannot run {extended.method!r}: the config's rope_type={extended.rope_type!r} is unknown to "
            f"{runtime}, and no setting computes the same. Extend the checkpoint by a method that plain transformers "
            f"can express (see ctxext methods). {extended.way_to_run} otherwise."
        )


def is_close(error: Any, matters: float) -> bool:
    """Return whether a difference in nats is rounding, compared with the extension's effect; a crash (text) is not."""
    return isinstance(error, float) and error <= CLOSE * matters


def runs(line: JsonObject) -> bool:
    """Return whether a program computes a model type as transformers does in any form that its table has."""
    forms = [form for form in line["forms"].values() if isinstance(form.get("matters"), float)]
    return any(is_close(error, form["matters"]) for form in forms for error in (line.get("noise"), *form.values()))


def longest(extended: ExtensionInConfig) -> int:
    """Return the longest text, in tokens, that the config promises."""
    return int(getattr(extended.text, "max_position_embeddings", None) or extended.target_length)


def longrope_scales(extended: ExtensionInConfig) -> JsonObject:
    """Return the keys that give vLLM and SGLang longrope's factor on cos and sin; none where they compute it so.

    Both read no attention_factor, and compute the factor from the two lengths.
    """
    if extended.rope_type != "longrope":
        return {}
    usual = longrope_scale_of(max(longest(extended), extended.target_length), extended.trained_length)
    is_same = abs(usual - extended.scale) <= 1e-6
    return {} if is_same else dict.fromkeys(("short_mscale", "long_mscale"), extended.scale)


def longrope_scale_of(length: int, original: int) -> float:
    """Compute longrope's factor on cos and sin from the two lengths in tokens."""
    return 1.0 if length <= original else math.sqrt(1 + math.log(length / original) / math.log(original))


def whole(extended: ExtensionInConfig, rope: JsonObject) -> JsonObject:
    """Complete ``rope_parameters`` with the other layer types, since an override replaces the whole dictionary."""
    return rope if extended.layer_type is None else dict(extended.text.rope_parameters) | {extended.layer_type: rope}


def overridden(extended: ExtensionInConfig, flag: str, overrides: JsonObject) -> tuple[str, ...]:
    """Return a flag with overrides for the decoder's config inside a composite one; nothing where there are none."""
    path = path_to(extended.config, extended.text)
    inside = functools.reduce(lambda inner, name: {name: inner}, reversed(path), overrides)
    return (flag, json.dumps(inside)) if overrides else ()
