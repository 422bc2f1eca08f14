"""Find the rotary frequencies of a model, read them before an extension, and prove them after it.

Before it, live modules are compared with the ones that the config builds, since methods start from the config; after
it, cos and sin of the live modules with the method's mathematics in float64.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ctxext.core.rebuild import Rebuild, running
from ctxext.core.scaling import FOLLOWING, FOREIGN_KEYS, is_windowed, mixes_windows
from ctxext.core.subject import SIDES, Subject
from ctxext.errors import IncompatibleError, PatchStateError
from ctxext.files import JsonObject
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.probe.layers import Layers, look, readers_of
from ctxext.spec import Frequencies, RopeSpec

# float32 carries a phase to about 2^-23 relative; the power base^(-2i/d) adds a few units more.
PHASE_ERROR = 2e-6
COS_ERROR = 2e-5

# Keys of a rope dict that describe its scaling; all others (mrope_section, ...) belong to the model and are kept.
SCALING_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
        *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
        *("ctxext", *FOREIGN_KEYS),
    }
)

# Rope types with plain frequencies inside the trained window; so has "dynamic", except in variants of single models.
PLAIN_INSIDE = frozenset({"default", "proportional"})
# Rope types whose frequencies are scaled at every length, so that weights may have been trained with them.
TRAINED_WITH = frozenset({"linear", "yarn", "longrope", "llama3"})


@dataclass(frozen=True)
class ProportionalSpec(RopeSpec):
    """A spec whose exponents run over the whole head, while only the first ``rotated`` pairs rotate (Gemma 4)."""

    rotated: int = 0


@dataclass(frozen=True)
class LatentSpec(RopeSpec):
    """A spec of latent attention (DeepSeek): a part of each head rotates, and ``temperature`` scales the whole head.

    transformers computes the temperature of queries and keys as ``0.1 * mscale_all_dim * ln(factor) + 1``.
    """

    temperature: float = 1.0


def takes_axes(rotary: nn.Module) -> bool:
    """Return whether a rotary module takes three rows of positions: time, height and width."""
    if getattr(rotary, "mrope_section", None) is not None:
        return True
    # Before transformers 5.17, Qwen2-VL's module has the sections in its config only.
    rope = getattr(getattr(rotary, "config", None), "rope_parameters", None)
    return isinstance(rope, dict) and rope.get("mrope_section") is not None


def rotating(spec: RopeSpec, frequencies: Frequencies) -> Frequencies:
    """Return a method's frequencies on a model: pairs that never rotate stay at 0, and the trained scale multiplies."""
    inv_freq = frequencies.inv_freq
    if isinstance(spec, ProportionalSpec):
        inv_freq = inv_freq.clone()
        inv_freq[spec.rotated :] = 0.0
    scale = 1.0 if isinstance(spec, LatentSpec) else frequencies.attention_scale
    return Frequencies(inv_freq, scale * spec.attention_scale)


@dataclass(frozen=True)
class RotaryPlace:
    """The place of one set of frequencies: a rotary module, and the layer type that it serves (None for all layers)."""

    path: str
    layer_type: str | None

    @property
    def prefix(self) -> str:
        """Prefix of the names of the module's buffers."""
        return "" if self.layer_type is None else f"{self.layer_type}_"

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that select these frequencies in calls of the module and of transformers' functions."""
        return {} if self.layer_type is None else {"layer_type": self.layer_type}

    def output(self, rotary: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cos and sin that a rotary module in this place computes for positions.

        Raises:
            IncompatibleError: if the module's code cannot be called with positions.
        """
        device = getattr(rotary, f"{self.prefix}inv_freq").device
        position_ids = positions[None].to(device)
        if takes_axes(rotary):
            position_ids = position_ids[None].expand(3, -1, -1)
        with running(type(rotary)):
            out = rotary(torch.zeros(1, len(positions), 1, device=device), position_ids, **self.arguments)
            # Llama 4 returns one complex tensor, cos + i sin, instead of a pair.
            if isinstance(out, Tensor):
                out = (out.real, out.imag)
            cos, sin = (part.reshape(-1, len(positions), part.shape[-1])[0] for part in out)
        return cos, sin

    def disagreement(
        self, rotary: nn.Module, expected: Callable[[int], Frequencies], lengths: Sequence[int]
    ) -> str | None:
        """Compare cos and sin of a rotary module with ``expected(length)`` in float64, at several positions.

        Returns:
            None if they agree, else one sentence that describes the difference.
        """
        for length in lengths:
            positions, frequencies = sampled_positions(length), expected(length)
            with torch.no_grad():
                # On the CPU first: not every device has float64.
                cos, sin = (part.cpu().double() for part in self.output(rotary, positions))
            angle, scale = positions[:, None].double() * frequencies.inv_freq, frequencies.attention_scale
            half, width = angle.shape[-1], cos.shape[-1]
            # A pair of dimensions is half a head apart (Llama), side by side (GPT-J), or one complex number.
            layouts = {half: [angle], 2 * half: [torch.cat((angle, angle), -1), angle.repeat_interleave(2, -1)]}
            if width not in layouts:
                return f"at length {length} it rotates {width} dimensions, and the method gives {half} frequencies."
            worst = math.inf
            for laid_out in layouts[width]:
                allowed = scale * (COS_ERROR + PHASE_ERROR * laid_out)  # what the rounding of float32 may cause
                errors = ((cos - scale * laid_out.cos()) / allowed, (sin - scale * laid_out.sin()) / allowed)
                error = max(float(part.abs().nan_to_num(nan=torch.inf).max()) for part in errors)
                worst = min(worst, error)
            if worst > 1.0:
                return (
                    f"at length {length} its cos and sin differ from the method's by {worst:.3g} times the float32 "
                    f"rounding error."
                )
        return None

    def rope_dict(self, text: Any) -> JsonObject:
        """Return the rope dict of a text config for these frequencies."""
        rope = text.rope_parameters
        if not isinstance(rope, dict):
            raise PatchStateError(
                f"The config of this {text.model_type} has rope_parameters={rope!r}, but its model was built with "
                f"other ones. Changing a config after loading has no effect on the model. Load the model again."
            )
        return dict(rope if self.layer_type is None else rope[self.layer_type])

    def rescaled(self, rope: JsonObject, form: JsonObject) -> JsonObject:
        """Return ``rope_parameters`` with ``form`` in this place; keep keys that do not describe scaling."""
        old = rope if self.layer_type is None else rope[self.layer_type]
        new = {key: value for key, value in old.items() if key not in SCALING_KEYS} | form
        if "llama_4_scaling_beta" in old:  # the temperature of its queries changes at this length, under every scaling
            new["original_max_position_embeddings"] = old["original_max_position_embeddings"]
        return new if self.layer_type is None else rope | {self.layer_type: new}


@dataclass(frozen=True)
class RotarySite(RotaryPlace):
    """A place with the frequencies that an extension starts from, either plain or as in the training."""

    spec: RopeSpec

    def mathematics(self, method: RopeMethod) -> Callable[[int], Frequencies]:
        """Return the function from a length to the frequencies that this model should use under ``method``."""
        return lambda length: rotating(self.spec, method.frequencies(self.spec, length))


def find_sites(
    subject: Subject, trained_length: int, *, scaled: bool = False, places: Sequence[RotaryPlace] = ()
) -> list[RotarySite]:
    """Find the frequencies of the decoder that reach beyond a sliding window, and the spec of each.

    ``scaled`` says that the weights were trained with the scaling of the config, rather than with plain frequencies.
    ``places`` may pass the places that ``survey`` has found already.

    Raises:
        IncompatibleError: if no such frequencies exist, or a method could extend none of them.
    """
    text = subject.text
    sites = []
    for place in places or survey(subject)[0]:
        kind = place.rope_dict(text).get("rope_type", "default")
        read = _trained_spec if scaled or kind not in TRAINED_WITH | PLAIN_INSIDE else _plain_spec
        spec = read(subject, place, trained_length)
        if not scaled and kind == "dynamic" and spec.inv_freq is not None:
            raise IncompatibleError(
                f"scaling='replace': this {text.model_type} was trained with the frequencies of its "
                f"rope_parameters={place.rope_dict(text)}, even on short texts. Without them, nothing is left to "
                f"extend. Pass scaling='extend' (--scaling extend)."
            )
        sites.append(RotarySite(place.path, place.layer_type, spec))
    return sites


def survey(subject: Subject) -> tuple[list[RotaryPlace], Layers]:
    """Return the places whose frequencies reach beyond a sliding window, and what the decoder's layers do with them.

    Raises:
        IncompatibleError: if no such place exists, or if windowed layers are mixed with full ones and the probe failed.
    """
    text = subject.text
    places, elsewhere = find_places(subject)
    if not places and elsewhere and getattr(text, "qk_rope_head_dim", None) == 0:
        raise IncompatibleError(
            f"This {text.model_type} has no positions to extend: the part that reads text does not rotate "
            f"(qk_rope_head_dim=0)."
        )
    if not places and elsewhere:
        raise IncompatibleError(
            f"The rotary modules of this {text.model_type} ({', '.join(elsewhere)}) follow configs of their own. No "
            f"single change of its text config can extend them. Patch the part of the model that reads the text."
        )
    if not places:
        raise IncompatibleError(WINDOWS_ONLY.format(text.model_type))
    rotating_sides = [path for path, _ in subject.rotaries if {*SIDES} & {*path.split(".")}]
    if subject.config.is_encoder_decoder and rotating_sides:
        classes = ", ".join(sorted({type(module).__name__ for _, module in subject.rotaries}))
        raise IncompatibleError(
            f"This {subject.kind} is an encoder-decoder whose encoder and decoder rotate separately "
            f"({classes}). ctxext cannot extend it: a longer decoder alone would not let its encoder read further."
        )
    if next(readers_of(subject.model, places[0].path), None) is None:
        first = next(iter(inspect.signature(subject.model.forward).parameters))
        raise IncompatibleError(
            f"{type(subject.model).__name__} reads no tokens: the first argument of its forward is {first!r}. Patch "
            f"the model that contains it and reads the text."
        )
    # Last, because the probe runs the model's code on a twin; everything above reads modules and config.
    layers = look(subject.model, list(dict.fromkeys(place.path for place in places)))
    if layers.failure and places[0].layer_type is None and mixes_windows(text):
        raise IncompatibleError(
            f"This {text.model_type} mixes sliding-window layers with full ones, and ctxext cannot tell which of them "
            f"rotate: {UNSEEN.format(layers.failure)} If only the windowed layers rotate, an extension does harm."
        )
    if not layers.failure and not layers.rotating:
        raise IncompatibleError(
            f"This {text.model_type} has no positions to extend: none of its layers rotates by its rotary module."
        )
    whole = layers.attending - layers.windowed
    if layers.rotating and layers.rotating <= layers.windowed and whole - layers.rotating:
        raise IncompatibleError(WINDOWS_ONLY.format(text.model_type))
    return places, layers


UNSEEN = "its forward pass does not run without data ({})."

WINDOWS_ONLY = (
    "The rotary positions of this {} belong to its sliding-window layers only. Its other layers see the whole text "
    "and have no positions to extend."
)


def find_places(subject: Subject) -> tuple[list[RotaryPlace], list[str]]:
    """Return the places that reach beyond windows, and the paths of rotary modules that follow another config."""
    text, places, elsewhere = subject.text, list[RotaryPlace](), list[str]()
    for path, module in subject.rotaries:
        layers = getattr(text, "layer_types", None)
        # Some models hand changed copies of the text config to their modules, with its class and its layer types. Any
        # other config belongs to another part of the model, which a change of the text config would not reach.
        if type(module.config) is not type(text) or getattr(module.config, "layer_types", None) != layers:
            elsewhere.append(path)
            continue
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        places += [RotaryPlace(path, kind) for kind in kinds if kind is None or not is_windowed(kind)]
    return places, elsewhere


def _plain_spec(subject: Subject, place: RotaryPlace, trained_length: int) -> RopeSpec:
    """Read a spec off the module that an unscaled config builds, and check that its frequencies are plain."""
    text = subject.text
    parameters = place.rope_dict(text)
    base = parameters.get("rope_theta")
    if base is None:
        raise IncompatibleError(
            f"The config of this {text.model_type} has no rope_theta in rope_parameters={parameters}. "
            f"Add the base; the RoPE paper's is config.rope_parameters['rope_theta'] = 10000.0."
        )
    is_proportional = parameters.get("rope_type") == "proportional"
    live, name = subject.model.get_submodule(place.path), f"{place.prefix}inv_freq"
    unscaled: list[JsonObject] = [{"rope_type": "proportional" if is_proportional else "default"}]
    unscaled.append({"rope_type": "linear", "factor": 1.0})  # Mistral 4: its "default" rotates whole heads
    # Build a module from the config without its scaling: the frequencies of the live one may be scaled already, and
    # only the class knows how many dimensions it rotates.
    for form in unscaled:
        rope = place.rescaled(text.rope_parameters, form | {"rope_theta": base})
        rotary = Rebuild(subject, {"rope_parameters": rope}).rotary(place.path)
        inv_freq = getattr(rotary, name)
        if inv_freq.shape == getattr(live, name).shape:
            break
    spec = RopeSpec(rotary_dim=2 * inv_freq.shape[-1], base=float(base), trained_length=trained_length)
    if is_proportional:
        spec = ProportionalSpec(spec.rotary_dim, spec.base, trained_length, rotated=int(inv_freq.count_nonzero()))
    plain = rotating(spec, Frequencies(plain_inv_freq(spec)))
    problem = place.disagreement(rotary, lambda length: plain, [trained_length])
    if problem is None:
        return spec
    if live.config is not text:
        raise IncompatibleError(
            f"The rotary modules of this {text.model_type} have bases that differ from rope_theta of its config. No "
            f"single field could rescale them: {problem}"
        )
    raise IncompatibleError(
        f"The unextended rotary frequencies of this {text.model_type} are not base^(-2i/d). Every method of ctxext "
        f"starts from these: {problem}"
    )


def _trained_spec(subject: Subject, place: RotaryPlace, trained_length: int) -> RopeSpec:
    """Read the frequencies and the scale that a config with scaled positions gives a text of ``trained_length``."""
    plain = _plain_spec(subject, place, trained_length)
    text = subject.text
    parameters = place.rope_dict(text)
    if parameters.get("rope_type") == "proportional" and (parameters.get("factor") or 1.0) != 1:
        raise IncompatibleError(
            f"The frequencies of this {text.model_type} are 'proportional' with factor={parameters['factor']}. No "
            f"method can extend these. If the factor was added after training, remove it from config.json."
        )
    rotary = Rebuild(subject).rotary(place.path)
    length = trained_length
    if parameters.get("rope_type") == "dynamic":
        # Dynamic types scale nothing up to max_position_embeddings, so ask at a length inside.
        length = min(trained_length, getattr(text, "max_position_embeddings", None) or trained_length)
    place.output(rotary, torch.tensor([0, length - 1]))  # the call makes longrope switch to its set for long texts
    inv_freq = getattr(rotary, f"{place.prefix}inv_freq").double()
    scale = float(getattr(rotary, f"{place.prefix}attention_scaling", 1.0))
    unscaled = rotating(plain, Frequencies(plain_inv_freq(plain)))
    is_plain = scale == 1 and torch.allclose(inv_freq, unscaled.inv_freq, rtol=FLOAT32, atol=0.0)
    spec = plain
    if parameters.get("rope_type") in TRAINED_WITH or not is_plain:
        spec = replace(plain, inv_freq=tuple(inv_freq.tolist()), attention_scale=scale)
    if problem := place.disagreement(rotary, lambda _: Frequencies(inv_freq, scale), [length]):
        raise IncompatibleError(
            f"{type(rotary).__name__} of this {text.model_type} does not rotate by the frequencies in its buffers: "
            f"{problem} Its code interprets rope_parameters ({', '.join(map(str, parameters))}) in its own way. No "
            f"method can start from that."
        )
    return spec


FLOAT32 = 1e-5
"""Relative rounding error of frequencies computed as powers in float32."""


def sampled_positions(length: int) -> Tensor:
    """Return 0, the last position and the powers of two between: fast pairs show errors early, slow pairs late."""
    powers = {2**n for n in range(length.bit_length()) if 2**n < length}
    return torch.tensor(sorted({0, length - 1} | powers), dtype=torch.long)


LOAD_ANEW = (
    "If the config was changed after loading, load the model with it: from_pretrained(path, config=config). If a "
    "module was changed by hand or by another library, load the model again and patch it first."
)


def require_as_configured(
    subject: Subject, places: Sequence[RotaryPlace], trained_length: int, way_out: str = LOAD_ANEW
) -> None:
    """Check that live rotary modules compute what the model's config says; on the meta device they compute nothing yet.

    Raises:
        PatchStateError: if a module and the config differ, since one was changed after loading.
    """
    if not places:
        return
    text, rebuild = subject.text, Rebuild(subject)
    for place in places:
        live = subject.model.get_submodule(place.path)
        if any(buffer.is_meta for buffer in live.buffers()):
            continue
        problem = _unlike(place, live, rebuild.rotary(place.path), text, trained_length)
        if problem:
            raise PatchStateError(
                f"The live {type(live).__name__} of this {text.model_type} differs from its config "
                f"(rope_parameters={place.rope_dict(text)}): {problem}. {way_out}"
            )


def _unlike(place: RotaryPlace, live: nn.Module, built: nn.Module, text: Any, trained_length: int) -> str | None:
    """Return how a live module differs from the one that its config builds, both with frequencies of short texts."""
    short, current = f"{place.prefix}original_inv_freq", f"{place.prefix}inv_freq"
    follows = place.rope_dict(text).get("rope_type") in FOLLOWING
    for name in (short,) if follows else (short, current):
        actual, stated = getattr(live, name).detach().cpu(), getattr(built, name)
        if actual.shape != stated.shape:
            return f"{name} has {len(actual)} frequencies, and the config's {len(stated)}"
        rounding = max(FLOAT32, 2 * torch.finfo(actual.dtype).eps)
        rounded = stated.to(actual.dtype)  # float16 keeps few digits below 6e-5, and none below 6e-8
        different = ~torch.isclose(actual.double(), rounded.double(), rtol=rounding, atol=0.0)
        if different.any():
            pair = int(different.nonzero()[-1])  # the slowest one, which reaches furthest
            return f"{name}[{pair}] is {actual[pair]:.4g} radians per token, and the config's {stated[pair]:.4g}"
    live_inv_freq = getattr(live, short)
    with torch.no_grad():
        built = built.to(live_inv_freq.dtype)  # round both alike, if the live module was rounded
        getattr(built, short).copy_(live_inv_freq)
        getattr(built, current).copy_(live_inv_freq)
    longest = min(trained_length, getattr(text, "max_position_embeddings", None) or trained_length)
    for length in sorted({min(8, longest), max(longest - 1, 1)}):
        positions = sampled_positions(length)
        with torch.no_grad(), _undisturbed(live):
            computed = place.output(live, positions)
            expected = place.output(built, positions)
        for name, part, target in zip(("cos", "sin"), computed, expected, strict=True):
            if part.shape != target.shape:
                return f"it returns {list(part.shape)} numbers, and the config's {list(target.shape)}"
            error = float(
                (part.cpu().double() - target.double()).abs().max() / target.double().abs().max().clamp(min=1)
            )
            if not error <= COS_ERROR:
                return f"its {name} differs by {error:.2g} in a text of {length} tokens"
    return None


@contextlib.contextmanager
def _undisturbed(rotary: nn.Module) -> Iterator[None]:
    """Restore a rotary module after the block: a call may change its buffers and numbers."""
    before, buffers = dict(vars(rotary)), rotary._buffers
    rotary._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        vars(rotary).clear()
        vars(rotary).update(before)
        rotary._buffers = buffers
