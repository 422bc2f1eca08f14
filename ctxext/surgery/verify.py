"""Does a rotary module compute what a method's mathematics says? The proof behind promise 3."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ctxext.spec import Frequencies

__all__ = ["disagreement", "module_output"]

Output = Callable[[Tensor], tuple[Tensor, Tensor]]

# float32 carries a phase to about 2^-23 relative; the power base^(-2i/d) adds a few units more.
PHASE_ERROR = 2e-6
COS_ERROR = 2e-5


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


def module_output(rotary: nn.Module, layer_type: str | None = None, device: torch.device | str = "cpu") -> Output:
    """What a rotary module computes, as a function of positions."""
    kwargs = {} if layer_type is None else {"layer_type": layer_type}

    def output(positions: Tensor) -> tuple[Tensor, Tensor]:
        position_ids = positions[None].to(device)
        if getattr(rotary, "mrope_section", None) is not None:
            position_ids = position_ids[None].expand(3, -1, -1)
        out = rotary.forward(torch.zeros(1, len(positions), 1, device=device), position_ids, **kwargs)
        if isinstance(out, Tensor):
            out = (out.real, out.imag)
        cos, sin = (part.reshape(-1, len(positions), part.shape[-1])[0] for part in out)
        return cos, sin

    return output


def _positions(length: int) -> Tensor:
    """Powers of two from the first token to the last: fast dimensions show early, slow ones late."""
    powers = {2**n for n in range(length.bit_length()) if 2**n < length}
    return torch.tensor(sorted({0, length - 1} | powers), dtype=torch.long)


def _compare(cos: Tensor, sin: Tensor, positions: Tensor, expected: Frequencies) -> str | None:
    angle = positions[:, None].double() * expected.inv_freq
    half, width = angle.shape[-1], cos.shape[-1]
    if width == half:
        layouts = [angle]
    elif width == 2 * half:
        layouts = [torch.cat((angle, angle), -1), angle.repeat_interleave(2, -1)]
    else:
        return f"it rotates {width} dimensions, the method gives {half} frequencies."
    worst = min(_worst_error(cos, sin, laid_out, expected.attention_scale) for laid_out in layouts)
    if worst > 1.0:
        return f"its cos and sin differ from the method's by {worst:.3g} times the float32 rounding error."
    return None


def _worst_error(cos: Tensor, sin: Tensor, angle: Tensor, scale: float) -> float:
    """Largest error of cos and sin in units of what float32 may cost."""
    allowed = scale * (COS_ERROR + PHASE_ERROR * angle)
    errors = ((cos - scale * angle.cos()) / allowed, (sin - scale * angle.sin()) / allowed)
    return max(float(error.abs().nan_to_num(nan=torch.inf).max()) for error in errors)
