"""Choosing a backend: auto says why it passed others over, a name never falls back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ctxext.errors import BackendUnavailableError, InvalidParameterError, UnknownNameError
from ctxext.kernels import BACKENDS, PREFERENCE, Call, Need, select
from ctxext.kernels.flash import INSTALLED

HOPPER = Need(device="cuda", capability=(9, 0), dtype=torch.bfloat16, biased=True)


def test_auto_knows_every_name_it_prefers() -> None:
    assert set(PREFERENCE) <= set(BACKENDS)
    assert {"reference", "sdpa", "flash", "flex"} <= set(BACKENDS)


def test_auto_takes_the_first_that_can_and_says_why_not_the_others() -> None:
    backend, reasons = select("auto", Need())
    assert backend.name == "sdpa"
    assert reasons == {"flash": "flash-attn runs on CUDA only, found 'cpu'."}


def test_auto_prefers_flash_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTALLED, "flash", True)
    assert select("auto", HOPPER)[0].name == "flash"
    monkeypatch.setitem(INSTALLED, "flash", False)
    assert select("auto", HOPPER)[0].name == "sdpa"


@pytest.mark.parametrize(
    ("need", "installed", "chosen"),
    [
        ({}, ("flash", "flash3", "flash4"), "flash3"),
        ({}, ("flash", "flash4"), "flash4"),
        ({"capability": (10, 0)}, ("flash", "flash3", "flash4"), "flash4"),
        ({"capability": (8, 0)}, ("flash", "flash4"), "flash"),
        ({"biased": True, "lse": False}, ("flash", "flash3", "flash4"), "flash"),
        ({"training": True}, ("flash", "flash3", "flash4"), "sdpa"),
        ({"order": "free"}, ("flash3", "flash4"), "sdpa"),
    ],
)
def test_parts_of_a_text_go_to_the_kernels_written_for_the_device(
    need: dict[str, Any], installed: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in INSTALLED:
        monkeypatch.setitem(INSTALLED, name, name in installed)
    assert select("auto", replace(HOPPER, **{"biased": False, "lse": True} | need))[0].name == chosen


def test_dropout_on_cpu_goes_to_the_reference() -> None:
    backend, reasons = select("auto", Need(dropout=0.1))
    assert backend.name == "reference"
    assert set(reasons) == {"flash", "sdpa", "flex"}


def test_soft_caps_go_to_the_first_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, reasons = select("auto", Need(softcap=50.0, training=True))
    assert backend.name == "reference"
    assert reasons["sdpa"] == "it has no soft cap of scores."
    capped = replace(HOPPER, softcap=50.0)
    for is_installed, name in ((True, "flash"), (False, "flex")):
        monkeypatch.setitem(INSTALLED, "flash", is_installed)
        assert select("auto", capped)[0].name == name
        assert select("auto", replace(capped, lse=True, biased=False))[0].name == name


@pytest.mark.parametrize(
    ("name", "need", "error", "said"),
    [
        ("flex", Need(training=True), BackendUnavailableError, "'flex' .* no backward on CPU.* can: sdpa, reference"),
        ("auto", Need(order="external", window=4), BackendUnavailableError, "No .* this call. flash: .* reference: "),
        ("reference", Need(order="external", window=4), BackendUnavailableError, "No other backend can either"),
        ("sdap", Need(), UnknownNameError, r"Unknown attention backend 'sdap'\. Did you mean 'sdpa'\?"),
    ],
)
def test_a_named_backend_never_falls_back(name: str, need: Need, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        select(name, need)


@pytest.mark.parametrize(
    ("dtype", "how", "said"),
    [
        (torch.float32, {"scale": math.inf}, "scale must be above 0 and finite, found inf"),
        (torch.float32, {"scale": math.nan}, "scale must be above 0 and finite, found nan"),
        (torch.float32, {"scale": 1.0, "softcap": math.inf}, "softcap must be above 0 and finite, found inf"),
        (torch.float8_e4m3fn, {"scale": 1.0}, "of 16 bits or more"),
        (torch.float8_e5m2, {"scale": 1.0}, "of 16 bits or more"),
    ],
)
def test_numbers_that_give_none_are_refused(dtype: torch.dtype, how: dict[str, Any], said: str) -> None:
    q = torch.ones(1, 1, 2, 8).to(dtype)
    with pytest.raises(InvalidParameterError, match=said):
        Call.of(q, q, q, **how)
