"""Compiled blocks: what a torch cannot compile is refused."""

from __future__ import annotations

import re
from unittest.mock import Mock

import pytest
import torch

from ctxext.errors import BackendUnavailableError
from ctxext.kernels import Call, flex
from ctxext.kernels.blocks import PartRule
from ctxext.kernels.flex import Flex
from tests.kernels import cases


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_what_a_torch_cannot_compile_is_refused_with_its_version(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 on a CPU, with a soft cap: dynamo fails in a call with fake tensors."""

    fails = Mock(side_effect=torch._dynamo.exc.TorchRuntimeError("when making fake tensor call"))
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    kernel = flex._compiled.__wrapped__("cpu")
    monkeypatch.setattr(flex, "_compiled", lambda _: kernel)
    one = cases.case("causal", torch.float32, biased=False)
    calls = [
        lambda: Flex().attend(Call.of(*one.tensors(), one.layout, scale=one.scale, softcap=softcap)),
        lambda: Flex().with_lse(*one.tensors(), PartRule(one.scale, causal=True, softcap=softcap)),
    ]
    for call in calls:
        with torch.no_grad(), pytest.raises(BackendUnavailableError, match=re.escape(f"torch {torch.__version__}")):
            call()
