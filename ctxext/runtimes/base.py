"""What every runtime is told from, and what it is told in."""

from __future__ import annotations

import copy
import functools
import json
import math
import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ctxext.errors import IncompatibleError
from ctxext.methods.formulas import NEVER

CLOSE = 1e-3
"""Of what an extension changes: rounding in float32 reaches a twentieth of this."""
USUAL_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What YaRN takes where a config says nothing."""
STOCK_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@functools.cache
def read_table(path: Path) -> dict[str, Any]:
    """What was found out about every model type on one runtime; a script made the file."""
    table: dict[str, Any] = json.loads(path.read_text())
    return table


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to tell another runtime.

    Args:
        target: the name of the runtime.
        flags: command-line arguments, one string each, to pass on as they are.
        notes: sentences that the person who deploys must know.
        exact: whether the target is known to compute the same positions as the model patched in place, at every
            length; where it is not, a note says why.
        in_file: whether the flags are for a GGUF file that holds the extension, as ``export(gguf=...)`` writes it.
        file: the file that was written, with the extension in it; None where none was asked for.
    """

    target: str
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()
    exact: bool = True
    in_file: bool = False
    file: str | None = None

    @property
    def by_flag(self) -> dict[str, str]:
        """The value that follows each flag."""
        return dict(zip(self.flags[::2], self.flags[1::2], strict=True))

    def __str__(self) -> str:
        same = "the same positions as in transformers" if self.exact else "not the same positions, or not proven"
        wrote = [f"wrote {self.file}"] if self.file is not None else []
        return "\n  ".join([self.told, *wrote, same, *(f"- {note}" for note in self.notes)])

    @property
    def told(self) -> str:
        """The flags in one line of a shell, and which file they are for where it is not any file of the model."""
        flags = shlex.join(self.flags) or "no flags, its files say it all"
        return f"{flags} (with a GGUF file that ctxext export --gguf writes)" if self.in_file else flags


@dataclass(frozen=True, kw_only=True)
class OwnALiBi:
    """A model that was trained with ALiBi and is to read further, with the slopes that it has.

    Args:
        model_type: as its config says it.
        target_length: tokens that the extended model is meant for.
        unsaid: config fields that the files to be served do not hold yet.
    """

    model_type: str
    target_length: int
    unsaid: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExtensionInConfig:
    """An extension as its config says it, independent of what wrote it.

    Args:
        config: the extended config.
        layer_type: the layer type whose positions were extended; None where all layers share them.
        trained_length: tokens before the extension, where the config says so.
        target_length: tokens that the extended model is meant for.
        windows: lengths that its weights may have been trained for, where the config leaves that open.
        scale: what cos and sin are multiplied by.
        pairs: how many frequencies there are, where the config scales them.
        unsaid: config fields that the files to be served do not hold yet.
        left_over: keys in the rope dict of those files that mean something to other programs alone.
        guarded: whether those files keep out whoever reads the fields of transformers 4.
    """

    config: Any
    layer_type: str | None
    trained_length: int
    target_length: int
    scale: float
    unsaid: dict[str, Any]
    windows: tuple[int, ...] = ()
    left_over: frozenset[str] = frozenset()
    guarded: bool = False
    pairs: int | None = None

    @property
    def text(self) -> Any:
        """The part of the config that describes the decoder."""
        return self.config.get_text_config(decoder=True)

    @property
    def rope(self) -> dict[str, Any]:
        """The rope dict that was extended."""
        rope = dict(self._said)
        if "factor" in rope and rope["factor"] is None:  # stock code then takes the ratio of the lengths
            rope["factor"] = self.target_length / self.trained_length
        return rope

    @property
    def _said(self) -> dict[str, Any]:
        found: dict[str, Any] = self.text.rope_parameters
        return found if self.layer_type is None else dict(found[self.layer_type])

    @property
    def leaves_factor_open(self) -> bool:
        """Whether it is YaRN with a factor of null, which stock transformers alone fills in."""
        return self.rope_type == "yarn" and self._said.get("factor") is None

    @property
    def rope_type(self) -> str:
        """What the config calls the scaling."""
        name, _, _ = str(self.rope.get("rope_type", "default")).partition(":")  # ctxext's own end in a sentence
        return name

    @property
    def stock(self) -> bool:
        """Whether the rope type is one of stock transformers."""
        return self.rope_type in STOCK_TYPES

    @property
    def length_note(self) -> str | None:
        """What to know about the length to serve; None where the config leaves no doubt."""
        if not self.windows:
            return None
        return (
            f"This config does not say which length its weights were trained for: "
            f"{' or '.join(map(str, self.windows))} tokens. The runtimes that were read take {self.target_length}; "
            f"serve less where the weights know less."
        )

    @property
    def loses_factor(self) -> bool:
        """Whether its factor is one that no runtime here looks at."""
        return self.rope_type == "proportional" and self.rope.get("factor", 1.0) != 1.0

    @property
    def scales_scores(self) -> bool:
        """Whether YaRN's temperature multiplies whole scores of latent attention instead of cos and sin."""
        return bool(self.rope.get("mscale_all_dim")) and hasattr(self.text, "kv_lora_rank")

    @property
    def method(self) -> str:
        """The method's name, or the rope type where ctxext did not make the extension."""
        saved = getattr(self.config, "ctxext", None)
        return str(saved["method"]["method"]) if saved else self.rope_type


class Runtime(ABC):
    """A program that serves checkpoints, and how it is told of an extension.

    Attributes:
        name: as ``ctxext.export`` takes it.
        length_flag: the argument that sets the longest text; None where there is none.
        files_only: whether it learns of an extension from the checkpoint's files alone, and no argument tells it.
    """

    name: ClassVar[str]
    length_flag: ClassVar[str | None]
    files_only: ClassVar[bool] = False

    @abstractmethod
    def start(self, checkpoint: str, gguf: str) -> tuple[str, ...]:
        """The command that starts it, before the flags of an export; it serves ``checkpoint``, or the file ``gguf``."""

    @abstractmethod
    def export(self, extended: ExtensionInConfig) -> Export:
        """What to tell it of an extension of rotary positions.

        Raises:
            IncompatibleError: if it cannot run the extension, or would silently compute something else.
        """

    def needs_files(self, extended: ExtensionInConfig) -> IncompatibleError:
        """What to say of an extension that is not in the files yet, where these are all that is read."""
        return IncompatibleError(
            f"{self.name} has no setting that extends a {extended.text.model_type}; it reads config.json alone. Write "
            f"the extended checkpoint (ctxext patch SOURCE NEW), and export that one."
        )

    def export_own_alibi(self, extended: OwnALiBi) -> Export:
        """What to tell it of a model that has ALiBi of its own and keeps its slopes.

        Raises:
            IncompatibleError: if it is not known that it computes the same slopes; of most runtimes it is not.
        """
        raise IncompatibleError(
            f"{self.name} was not seen to run the ALiBi of a {extended.model_type}. Serve it with vLLM or llama.cpp "
            f"where they have it, or with transformers."
        )


def without_endless_table(extended: ExtensionInConfig) -> ExtensionInConfig:
    """A factor that stops all rotation as one divisor for each frequency.

    The linear scaling of vLLM and SGLang makes a table with as many rows as max_position_embeddings times the factor,
    and would not start (vLLM: linear_scaling_rope.py, _compute_cos_sin_cache).
    """
    if extended.rope_type != "linear" or extended.rope["factor"] < NEVER or extended.pairs is None:
        return extended
    rope = {key: value for key, value in extended.rope.items() if key != "factor"} | {
        "rope_type": "longrope",
        "factor": extended.target_length / extended.trained_length,
        "original_max_position_embeddings": extended.trained_length,
        "attention_factor": 1.0,
        "short_factor": [NEVER] * extended.pairs,
        "long_factor": [NEVER] * extended.pairs,
    }
    config, parameters = copy.deepcopy(extended.config), whole(extended, rope)
    config.get_text_config(decoder=True).rope_parameters = parameters
    return replace(extended, config=config, unsaid=extended.unsaid | {"rope_parameters": parameters})


def require_known_type(runtime: str, extended: ExtensionInConfig) -> None:
    """For runtimes that refuse every rope type but those of stock transformers.

    Raises:
        IncompatibleError: the config holds another.
    """
    if not extended.stock:
        raise IncompatibleError(
            f"{runtime} cannot run {extended.method!r}: the config says rope_type={extended.rope_type!r}, which "
            f"{runtime} refuses as unknown, and it has no setting that computes the same. Extend the checkpoint by a "
            f"method with a stock form instead (ctxext methods lists them), or serve it with transformers."
        )


def is_close(error: Any, matters: float) -> bool:
    """Whether a difference in nats is rounding, beside what the extension changes; what stopped is not close."""
    return isinstance(error, float) and error <= CLOSE * matters


def longest(extended: ExtensionInConfig) -> int:
    """The longest text that the config promises."""
    return int(getattr(extended.text, "max_position_embeddings", None) or extended.target_length)


def longrope_scale(extended: ExtensionInConfig) -> float:
    """What vLLM and SGLang compute where the config says nothing else: they look at the lengths only."""
    return longrope_scale_of(max(longest(extended), extended.target_length), extended.trained_length)


def longrope_scale_of(length: int, original: int) -> float:
    """What longrope multiplies cos and sin by, computed from the two lengths in tokens."""
    return 1.0 if length <= original else math.sqrt(1 + math.log(length / original) / math.log(original))


def whole(extended: ExtensionInConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` complete, since an override replaces the whole dictionary."""
    return rope if extended.layer_type is None else dict(extended.text.rope_parameters) | {extended.layer_type: rope}


def nested(extended: ExtensionInConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides at the place of the decoder's config inside a composite one."""
    if extended.text is extended.config:
        return overrides
    parts = [name for name in extended.config.sub_configs if getattr(extended.config, name, None) is extended.text]
    return {parts[0]: overrides}
