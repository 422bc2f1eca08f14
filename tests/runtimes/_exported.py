"""What a runtime must compute of an exported checkpoint."""

from __future__ import annotations

import numpy as np

from ctxext.methods import METHODS, Method, RopeMethod
from ctxext.spec import RopeSpec
from tests._checkpoints import TRAINED
from tests._models import FOR_LLAMA

SPEC = RopeSpec(rotary_dim=16, base=10000.0, trained_length=TRAINED)
TARGET = 4 * TRAINED
Spectrum = tuple[np.ndarray, float]


def wanted(method: Method, length: int) -> Spectrum:
    assert isinstance(method, RopeMethod)
    frequencies = method.frequencies(SPEC, length)
    return frequencies.inv_freq.numpy(), frequencies.attention_scale


def same(found: Spectrum, expected: Spectrum) -> bool:
    # What does not turn is divided by 1e30, which no text would notice.
    return bool(np.allclose(found[0], expected[0], rtol=2e-6, atol=1e-29)) and abs(found[1] - expected[1]) < 1e-6


VARIANTS: list[Method] = [
    *(kind.example(SPEC) for kind in FOR_LLAMA.values()),
    METHODS["yarn"].from_dict({"factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}),
    METHODS["yarn"].from_dict({"factor": 4.0, "truncate": False}),
    METHODS["yarn"].from_dict({"factor": 4.0, "attention_factor": 1.0}),
    METHODS["yarn"].from_dict({"factor": 4.0, "ramp": "turns"}),
    METHODS["longrope"].from_dict({"factor": 4.0, "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}),
    METHODS["ntk_by_parts"].from_dict({"factor": 4.0}),
    METHODS["nope"].from_dict({"factor": 4.0, "sharpening": 0.2}),
    METHODS["yarn"].from_dict({"factor": 4.0, "clip": 3}),
    METHODS["yarn"].from_dict({"factor": 4.0, "divisor": 3.0, "beta_fast": 16.0, "truncate": False}),
    METHODS["yarn"].from_dict({"factor": 4.0, "divisor": 5.0}),
]


def label(method: Method) -> str:
    extra = {key: value for key, value in method.to_dict().items() if not isinstance(value, list)}
    return "-".join(str(value) for value in extra.values() if value is not None)
