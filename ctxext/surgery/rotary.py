"""Where rotary frequencies live in a model, and what they are when nothing extends them.

And the proof that a module rotates by them: its cos and sin, compared with a method's mathematics in float64.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.spec import Frequencies, RopeSpec
from ctxext.surgery.probe import Layers, look, reader_of
from ctxext.surgery.published import FOREIGN_KEYS
from ctxext.surgery.rebuild import Rebuild, restoring, rotaries, running
from ctxext.surgery.texts import text_of
from ctxext.surgery.windows import is_windowed, mixes_windows

Output = Callable[[Tensor], tuple[Tensor, Tensor]]

# float32 carries a phase to about 2^-23 relative; the power base^(-2i/d) adds a few units more.
PHASE_ERROR = 2e-6
COS_ERROR = 2e-5

# Keys of a rope dict that say how it is scaled; all others (mrope_section, ...) belong to the model and are kept.
SCALING_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        *("ctxext", *FOREIGN_KEYS),
    }
)

# Rope types that give plain frequencies inside the trained window; "dynamic" does but for variants of single models.
PLAIN_INSIDE = frozenset({"default", "proportional"})
# ... and those whose frequencies are the scaled ones at every length.
TRAINED_WITH = frozenset({"linear", "yarn", "longrope", "llama3"})


@dataclass(frozen=True)
class ProportionalSpec(RopeSpec):
    """Exponents run over the whole head, but only the first ``rotated`` pairs rotate at all (Gemma 4)."""

    rotated: int = 0


@dataclass(frozen=True)
class LatentSpec(RopeSpec):
    """Only a part of each head rotates: queries and keys are multiplied by ``temperature`` as a whole (DeepSeek).

    Stock code reads it off the config as ``0.1 * mscale_all_dim * ln(factor) + 1``.
    """

    temperature: float = 1.0


def takes_axes(rotary: nn.Module) -> bool:
    """Whether a rotary module takes three rows of positions: of time, height and width."""
    if getattr(rotary, "mrope_section", None) is not None:
        return True
    # Qwen2-VL's keeps the sections in its config alone before transformers 5.17.
    rope = getattr(getattr(rotary, "config", None), "rope_parameters", None)
    return isinstance(rope, dict) and rope.get("mrope_section") is not None


def rotating(spec: RopeSpec, frequencies: Frequencies) -> Frequencies:
    """What a model of this spec makes of a method's frequencies.

    Pairs that never rotate stay at zero, and the method's scale comes on top of the one that the weights know.
    """
    inv_freq = frequencies.inv_freq
    if isinstance(spec, ProportionalSpec):
        inv_freq = inv_freq.clone()
        inv_freq[spec.rotated :] = 0.0
    scale = 1.0 if isinstance(spec, LatentSpec) else frequencies.attention_scale
    return Frequencies(inv_freq, scale * spec.attention_scale)


@dataclass(frozen=True)
class RotaryPlace:
    """Where one set of frequencies lives: a rotary module, and the layer type it serves (None = all layers)."""

    path: str
    layer_type: str | None

    @property
    def prefix(self) -> str:
        """What the names of the module's buffers start with."""
        return "" if self.layer_type is None else f"{self.layer_type}_"

    @property
    def arguments(self) -> dict[str, Any]:
        """What tells the module, and stock rope functions, which of its frequencies are meant."""
        return {} if self.layer_type is None else {"layer_type": self.layer_type}

    def output(self, rotary: nn.Module, device: torch.device | str = "cpu") -> Output:
        """What a rotary module in this place computes, as a function of positions.

        The function raises ``IncompatibleError`` where the module's code cannot be called so.
        """

        def cos_and_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
            position_ids = positions[None].to(device)
            if takes_axes(rotary):
                position_ids = position_ids[None].expand(3, -1, -1)
            with running(type(rotary)):
                out = rotary(torch.zeros(1, len(positions), 1, device=device), position_ids, **self.arguments)
                if isinstance(out, Tensor):
                    out = (out.real, out.imag)
                cos, sin = (part.reshape(-1, len(positions), part.shape[-1])[0] for part in out)
            return cos, sin

        return cos_and_sin

    def rope_dict(self, text: Any) -> dict[str, Any]:
        """What a text config says of these frequencies."""
        rope = text.rope_parameters
        if not isinstance(rope, dict):
            raise PatchStateError(
                f"The config of this {text.model_type} has rope_parameters={rope!r}, and its model was built with "
                f"some. A config that is changed after loading changes nothing: load the model anew."
            )
        return dict(rope if self.layer_type is None else rope[self.layer_type])

    def rescaled(self, rope: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
        """All of a config's ``rope_parameters`` with ``form`` in this place; keys that are not about scaling stay."""
        old = rope if self.layer_type is None else rope[self.layer_type]
        new = {key: value for key, value in old.items() if key not in SCALING_KEYS} | form
        if "llama_4_scaling_beta" in old:  # the temperature of its queries steps there, whatever scales positions
            new["original_max_position_embeddings"] = old["original_max_position_embeddings"]
        return new if self.layer_type is None else rope | {self.layer_type: new}


@dataclass(frozen=True)
class RotarySite(RotaryPlace):
    """A place with what its frequencies are before they are extended: plain ones, or those of the training."""

    spec: RopeSpec

    def mathematics(self, method: RopeMethod) -> Callable[[int], Frequencies]:
        """What this model makes of a method's frequencies, as a function of the length."""
        return lambda length: rotating(self.spec, method.frequencies(self.spec, length))


def find_sites(
    model: PreTrainedModel, trained_length: int, *, scaled: bool = False, places: Sequence[RotaryPlace] = ()
) -> list[RotarySite]:
    """Frequencies of the decoder that reach beyond a sliding window, with what an extension starts from.

    Args:
        model: a model with rotary positions.
        trained_length: tokens that its weights were trained for.
        scaled: whether they were trained with the scaling that the config has, rather than with plain frequencies.
        places: where they are, from ``survey``; found if left out.

    Raises:
        IncompatibleError: if there are none, or none that a method could extend.
    """
    text = text_of(model.config)
    found = []
    for place in places or survey(model)[0]:
        kind = place.rope_dict(text).get("rope_type", "default")
        if scaled or kind not in TRAINED_WITH | PLAIN_INSIDE:
            spec = _trained_spec(model, place, trained_length)
        else:
            spec = _plain_spec(model, place, trained_length)
        if not scaled and kind == "dynamic" and spec.inv_freq is not None:
            raise IncompatibleError(
                f"scaling='replace': the weights of this {text.model_type} know no other frequencies than those of its "
                f"rope_parameters={place.rope_dict(text)}, short texts included, so there is nothing to take off. Pass "
                f"scaling='extend'."
            )
        found.append(RotarySite(place.path, place.layer_type, spec))
    return found


def survey(model: PreTrainedModel) -> tuple[list[RotaryPlace], Layers]:
    """Where frequencies of the decoder reach beyond a sliding window, and what its layers do with them.

    Raises:
        IncompatibleError: if nowhere, or where windows and whole layers mix and the layers could not be seen.
    """
    text = text_of(model.config)
    places = _candidates(model, text)
    both = [path for path, _ in rotaries(model) if {"encoder", "decoder"} & set(path.split("."))]
    if model.config.is_encoder_decoder and both:
        classes = ", ".join(sorted({type(module).__name__ for _, module in rotaries(model)}))
        raise IncompatibleError(
            f"This {model.config.model_type} is an encoder-decoder: the text is read by its encoder and written by its "
            f"decoder, and each of them rotates by itself ({classes}). To extend the decoder alone would not let it "
            f"read further, so ctxext extends neither."
        )
    if reader_of(model, places[0].path) is None:
        first = next(iter(inspect.signature(model.forward).parameters))
        raise IncompatibleError(
            f"{type(model).__name__} reads no tokens (the first argument of its forward is {first!r}). ctxext extends "
            f"what reads text; patch the model that this one is a part of."
        )
    layers = look(model, list(dict.fromkeys(place.path for place in places)))
    if layers.failure and places[0].layer_type is None and mixes_windows(text):
        raise IncompatibleError(
            f"This {text.model_type} has layers with a sliding window beside others, and which of its layers rotate "
            f"could not be seen: {UNSEEN.format(layers.failure)} If only the windowed ones do, an extension would harm "
            f"and not help."
        )
    if layers.rotates_in_windows_only:
        raise IncompatibleError(WINDOWS_ONLY.format(text.model_type))
    return places, layers


UNSEEN = "its forward pass does not run without data ({})."

WINDOWS_ONLY = (
    "The rotary positions of this {} belong to its sliding-window layers only, and its other layers have no positions "
    "to extend: they already see everything."
)


def _candidates(model: PreTrainedModel, text: Any) -> list[RotaryPlace]:
    """All frequencies of the decoder, but for those that the config gives to windowed layers by name.

    Raises:
        IncompatibleError: there are none.
    """
    places, elsewhere = _places(model, text)
    if places:
        return places
    if elsewhere:
        raise IncompatibleError(
            f"This {text.model_type} is made of parts with a config each ({', '.join(elsewhere)} rotate by their own), "
            f"so no one extension of its config lengthens its reach."
        )
    raise IncompatibleError(WINDOWS_ONLY.format(text.model_type))


def _places(model: PreTrainedModel, text: Any) -> tuple[list[RotaryPlace], list[str]]:
    """What ``_candidates`` returns, and the paths of rotary modules that follow another config than ``text``."""
    places, elsewhere = list[RotaryPlace](), list[str]()
    for path, module in rotaries(model):
        if module.config is not text and not _is_copy(module.config, text):
            elsewhere.append(path)
            continue
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        places += [RotaryPlace(path, kind) for kind in kinds if kind is None or not is_windowed(kind)]
    return places, elsewhere


def _is_copy(config: Any, text: Any) -> bool:
    """Whether a config is a changed copy of the text config, which some models hand to their modules."""
    return type(config) is type(text) and getattr(config, "layer_types", None) == getattr(text, "layer_types", None)


def _plain_spec(model: PreTrainedModel, place: RotaryPlace, trained_length: int) -> RopeSpec:
    """Read a spec off the module that an unscaled config builds, and make sure that its frequencies are plain."""
    text = text_of(model.config)
    parameters = place.rope_dict(text)
    base = parameters.get("rope_theta")
    if base is None:
        raise IncompatibleError(
            f"The config of this {text.model_type} has no rope_theta in rope_parameters={parameters}. "
            f"Put it there: config.rope_parameters['rope_theta'] = 10000.0 is the default of the RoPE paper."
        )
    is_proportional = parameters.get("rope_type") == "proportional"
    unscaled = {"rope_type": "proportional" if is_proportional else "default", "rope_theta": base}
    rotary = Rebuild(model, {"rope_parameters": place.rescaled(text.rope_parameters, unscaled)}).rotary(place.path)
    inv_freq, live = (getattr(one, f"{place.prefix}inv_freq") for one in (rotary, model.get_submodule(place.path)))
    if inv_freq.shape != live.shape:  # Mistral 4: its own default forgets that part of a head rotates
        unscaled = {"rope_type": "linear", "rope_theta": base, "factor": 1.0}
        rotary = Rebuild(model, {"rope_parameters": place.rescaled(text.rope_parameters, unscaled)}).rotary(place.path)
        inv_freq = getattr(rotary, f"{place.prefix}inv_freq")
    spec = RopeSpec(rotary_dim=2 * inv_freq.shape[-1], base=float(base), trained_length=trained_length)
    if is_proportional:
        spec = ProportionalSpec(spec.rotary_dim, spec.base, trained_length, rotated=int(inv_freq.count_nonzero()))
    plain = rotating(spec, Frequencies(plain_inv_freq(spec)))
    problem = disagreement(place.output(rotary), lambda length: plain, [trained_length])
    if problem is None:
        return spec
    if model.get_submodule(place.path).config is not text:
        raise IncompatibleError(
            f"This {text.model_type} has rotary modules with a rope_theta of their own, which no field of its config "
            f"could rescale together: {problem}"
        )
    raise IncompatibleError(
        f"The unextended rotary positions of this {text.model_type} are not base^(-2i/d), which every method here "
        f"starts from: {problem}"
    )


def _trained_spec(model: PreTrainedModel, place: RotaryPlace, trained_length: int) -> RopeSpec:
    """Read what a checkpoint was trained with whose positions are scaled already.

    These are the frequencies and the scale of cos and sin that its config gives a text of ``trained_length`` tokens,
    in the float32 that its weights saw.
    """
    plain = _plain_spec(model, place, trained_length)
    text = text_of(model.config)
    parameters = place.rope_dict(text)
    if parameters.get("rope_type") == "proportional" and (parameters.get("factor") or 1.0) != 1:
        raise IncompatibleError(
            f"The frequencies of this {text.model_type} are 'proportional' with factor={parameters['factor']}, which "
            f"no method here can extend. Where that factor was put on after training, take it out of config.json."
        )
    rotary = Rebuild(model).rotary(place.path)
    output, length = place.output(rotary), trained_length
    if parameters.get("rope_type") == "dynamic":
        length = min(trained_length, getattr(text, "max_position_embeddings", None) or trained_length)
    output(torch.tensor([0, length - 1]))  # longrope: its set for long texts
    inv_freq = getattr(rotary, f"{place.prefix}inv_freq").double()
    scale = float(getattr(rotary, f"{place.prefix}attention_scaling", 1.0))
    usual = rotating(plain, Frequencies(plain_inv_freq(plain)))
    is_plain = scale == 1 and torch.allclose(inv_freq, usual.inv_freq, rtol=FLOAT32, atol=0.0)
    spec = plain
    if parameters.get("rope_type") in TRAINED_WITH or not is_plain:
        spec = replace(plain, inv_freq=tuple(inv_freq.tolist()), attention_scale=scale)
    if problem := disagreement(output, lambda _: Frequencies(inv_freq, scale), [length]):
        raise IncompatibleError(
            f"{type(rotary).__name__} of this {text.model_type} does not rotate by the frequencies that it holds: "
            f"{problem} Its code reads rope_parameters in a way of its own ({', '.join(map(str, parameters))}), which "
            f"no method here can start from."
        )
    return spec


FLOAT32 = 1e-5
"""Relative difference of frequencies that powers in float32 may cost."""


LOAD_ANEW = (
    "A config that is changed after loading changes nothing: load the model with it, from_pretrained(path, "
    "config=config). A module that was changed by hand or by another library: load the model anew, and patch it first."
)
PATCH_ANEW = (
    "One of them was changed after the extension, which no saved checkpoint could hold. Call ctxext.unpatch(model) "
    "and ctxext.patch with the values that you want, then save."
)


def require_as_patched(model: PreTrainedModel, trained_length: int) -> None:
    """Make sure that every rotary module of an extended model still computes what its config says.

    Raises:
        PatchStateError: with what the module computes and what the config says.
    """
    places, _ = _places(model, text_of(model.config))
    require_as_configured(model, places, trained_length, PATCH_ANEW)


def require_as_configured(
    model: PreTrainedModel, places: Sequence[RotaryPlace], trained_length: int, way_out: str = LOAD_ANEW
) -> None:
    """Make sure that live rotary modules compute what the model's config says.

    Methods start from the config. Where somebody changed it after loading, or changed the modules, the weights are
    used with other positions than it says. Modules on the meta device compute nothing yet, and pass.

    Raises:
        PatchStateError: with what the module computes and what the config says.
    """
    if not places:
        return
    text, rebuild = text_of(model.config), Rebuild(model)
    for place in places:
        live = model.get_submodule(place.path)
        if any(buffer.is_meta for buffer in live.buffers()):
            continue
        problem = _unlike(place, live, rebuild.rotary(place.path), text, trained_length)
        if problem:
            raise PatchStateError(
                f"The live {type(live).__name__} of this {text.model_type} is not what its config says "
                f"(rope_parameters={place.rope_dict(text)}): {problem}. {way_out}"
            )


def _unlike(place: RotaryPlace, live: nn.Module, built: nn.Module, text: Any, trained_length: int) -> str | None:
    """How a live rotary module differs from the one that its config builds; None where it does not.

    Both start from the frequencies of short texts: a module that follows the length has others after a long one.
    """
    short, current = f"{place.prefix}original_inv_freq", f"{place.prefix}inv_freq"
    follows = place.rope_dict(text).get("rope_type") in ("dynamic", "longrope")
    for name in (short,) if follows else (short, current):
        has, says = getattr(live, name).detach().cpu(), getattr(built, name)
        if has.shape != says.shape:
            return f"{name} has {len(has)} frequencies, and the config's {len(says)}"
        rounding = max(FLOAT32, 2 * torch.finfo(has.dtype).eps)
        rounded = says.to(has.dtype)  # float16 keeps few digits of what is below 6e-5, and nothing below 6e-8
        different = ~torch.isclose(has.double(), rounded.double(), rtol=rounding, atol=0.0)
        if different.any():
            pair = int(different.nonzero()[-1])  # the slowest, which reaches furthest
            return f"{name}[{pair}] is {has[pair]:.4g} radians per token, and the config's {says[pair]:.4g}"
    held = getattr(live, short)
    with torch.no_grad():
        built = built.to(held.dtype)  # a module that was rounded is compared with one that is rounded likewise
        getattr(built, short).copy_(held)
        getattr(built, current).copy_(held)
    longest = min(trained_length, getattr(text, "max_position_embeddings", None) or trained_length)
    for length in sorted({min(8, longest), max(longest - 1, 1)}):
        positions = _positions(length)
        with torch.no_grad(), _undisturbed(live):
            ours_and_theirs = zip(
                place.output(live, held.device)(positions), place.output(built)(positions), strict=True
            )
        for what, (one, other) in zip(("cos", "sin"), ours_and_theirs, strict=True):
            if one.shape != other.shape:
                return f"it returns {list(one.shape)} numbers, and the config's {list(other.shape)}"
            error = float((one.double().cpu() - other.double()).abs().max() / other.double().abs().max().clamp(min=1))
            if not error <= COS_ERROR:
                return f"its {what} of a text of {length} tokens is another (off by {error:.2g})"
    return None


@contextlib.contextmanager
def _undisturbed(rotary: nn.Module) -> Iterator[None]:
    """Leave a rotary module as it was, whatever a call makes of its buffers and numbers."""
    before, buffers = dict(vars(rotary)), rotary._buffers
    rotary._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        vars(rotary).clear()
        vars(rotary).update(before)
        rotary._buffers = buffers


def disagreement(output: Output, expected: Callable[[int], Frequencies], lengths: list[int]) -> str | None:
    """Compare cos and sin as they are computed with ``expected(length)`` in float64, at several positions and lengths.

    Returns:
        None where they agree, else one sentence saying what was found.
    """
    for length in lengths:
        positions = _positions(length)
        with torch.no_grad():
            cos, sin = (part.double().cpu() for part in output(positions))
        problem = _compare(cos, sin, positions, expected(length))
        if problem:
            return f"at length {length} {problem}"
    return None


def _positions(length: int) -> Tensor:
    """Powers of two from the first token to the last: fast dimensions show early, slow ones late."""
    powers = {2**n for n in range(length.bit_length()) if 2**n < length}
    return torch.tensor(sorted({0, length - 1} | powers), dtype=torch.long)


def _compare(cos: Tensor, sin: Tensor, positions: Tensor, expected: Frequencies) -> str | None:
    angle = positions[:, None].double() * expected.inv_freq
    half, width = angle.shape[-1], cos.shape[-1]
    # Pairs of dimensions stand half a head apart (Llama), side by side (GPT-J), or once for both (complex numbers).
    layouts = {half: [angle], 2 * half: [torch.cat((angle, angle), -1), angle.repeat_interleave(2, -1)]}
    if width not in layouts:
        return f"it rotates {width} dimensions, the method gives {half} frequencies."
    worst = min(_worst_error(cos, sin, laid_out, expected.attention_scale) for laid_out in layouts[width])
    if worst > 1.0:
        return f"its cos and sin differ from the method's by {worst:.3g} times the float32 rounding error."
    return None


def _worst_error(cos: Tensor, sin: Tensor, angle: Tensor, scale: float) -> float:
    """Largest error of cos and sin in units of what float32 may cost."""
    allowed = scale * (COS_ERROR + PHASE_ERROR * angle)
    errors = ((cos - scale * angle.cos()) / allowed, (sin - scale * angle.sin()) / allowed)
    return max(float(error.abs().nan_to_num(nan=torch.inf).max()) for error in errors)


@dataclass
class PinnedApply:
    """Stands in for ``module._apply``: moves tensors between devices but never rounds them.

    ``model.bfloat16()`` would otherwise round ``inv_freq``: 0.7 rad of phase error at position 4096. Frequencies are in
    no checkpoint, so a model that was built without memory has none either once ``to_empty`` has given it some, and
    nothing would say so: they are computed then.
    """

    module: nn.Module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Apply ``fn``, undo a change of floating dtype, and fill what had no memory before."""
        without_memory = [name for name, buffer in self.module.named_buffers(recurse=False) if buffer.is_meta]

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype != tensor.dtype:
                return tensor.to(device=moved.device)
            return moved

        type(self.module)._apply(self.module, keep_dtype, recurse)  # type: ignore[no-untyped-call]
        empty = [name for name in without_memory if not self.module.get_buffer(name).is_meta]
        if empty:
            with restoring(), torch.device("cpu"), torch.no_grad():
                computed = type(self.module)(self.module.config)
                for name in empty:
                    self.module.get_buffer(name).copy_(computed.get_buffer(name))
        return self.module
