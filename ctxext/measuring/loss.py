"""Loss by position, with everything before it or with the old tokens thrown away.

A *position* is the one from which the model predicts: position ``i`` has seen tokens 0..i and is charged for token
``i + 1``. A text of N + 1 tokens therefore gives losses at positions 0..N-1, and a model trained for L tokens is
outside its window from position L on. All losses are natural logarithms (nats) per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ctxext.errors import InvalidParameterError
from ctxext.measuring.forward import check_known, check_token_ids, logits_in_chunks


# Not inference_mode: a dynamic method may leave its buffers behind, and inference tensors cannot be trained with.
@torch.no_grad()
def loss_by_position(
    model: nn.Module,
    input_ids: Int[Tensor, "batch tokens"],
    *,
    start: int = 0,
    chunk: int | None = None,
    cached: int | None = None,
) -> Float[Tensor, "batch positions"]:
    """Compute the loss at every position from one forward pass.

    For a causal model whose positions do not depend on the length of the text (every method here but the dynamic
    ones), the losses at the first n positions equal the losses of the text cut to n + 1 tokens: one pass gives the
    perplexity at every shorter length. A dynamic method uses the frequencies of the full length at all positions.

    The head runs in the model's own dtype, as it does when the model generates; softmax and logarithm in float32.

    Args:
        input_ids: whole texts, at least 2 tokens, no padding. Put a BOS token in front where the model wants one.
        chunk: positions for which logits exist at a time, at least 1; default as many as take about 128 MiB. The
            result does not depend on it.
        cached: None for an uncached pass; or tokens per call of a pass with a KV cache, which takes less memory and,
            on a CPU, two to three times as long. The result is the same up to rounding.

    Returns:
        Nats per token, float32, on the CPU; ``positions`` is ``tokens - 1 - start``.

    Raises:
        InvalidParameterError: ``input_ids`` or ``chunk`` out of range.
        IncompatibleError: the model's losses cannot be had this way (see ``logits_in_chunks``).
    """
    return torch.cat([*_pieces(model, input_ids, start=start, chunk=chunk, cached=cached)], dim=1)


def _pieces(model: nn.Module, input_ids: Tensor, **how: Any) -> Iterator[Float[Tensor, "batch piece"]]:
    """Yield the losses of consecutive positions; ``how`` is for ``logits_in_chunks``."""
    check_token_ids(input_ids)
    check_known(model, input_ids[:, :1])
    check_known(model, input_ids[:, 1:], predicted=True)
    inputs, targets = (part.to(next(model.parameters()).device) for part in (input_ids[:, :-1], input_ids[:, 1:]))
    for first, logits in logits_in_chunks(model, inputs, **how):
        wanted = targets[:, first : first + logits.shape[1]]
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none")
        yield losses.view(wanted.shape).cpu()


@torch.no_grad()
def loss_while(
    model: nn.Module,
    input_ids: Int[Tensor, "1 tokens"],
    *,
    piece: int,
    go_on: Callable[[Float[Tensor, " read"]], bool],
) -> Float[Tensor, " read"]:
    """Compute the losses of one text from its beginning, piece by piece, until ``go_on`` says stop.

    Returns:
        Nats per token, float32, on the CPU: of the whole text, or of as many pieces as were read.

    Raises:
        InvalidParameterError: as ``loss_by_position``.
        IncompatibleError: as ``loss_by_position``.
    """
    read = torch.empty(0)
    for losses in _pieces(model, input_ids, chunk=None, cached=piece):
        read = torch.cat([read, losses[0]])
        if len(read) % piece == 0 and len(read) < input_ids.shape[1] - 1 and not go_on(read):
            break
    return read


@torch.no_grad()
def truncated_loss(
    model: nn.Module,
    input_ids: Int[Tensor, "batch tokens"],
    *,
    window: int,
    stride: int | None = None,
    start: int = 0,
    prefix: int = 0,
    chunk: int | None = None,
    cached: int | None = None,
) -> Float[Tensor, "batch positions"]:
    """Compute the losses when the model sees only the last ``window`` tokens: a sliding window, or truncation.

    On the unpatched model with its trained length or less, this is what a user without a longer context does.
    ``ctxext.measuring.truncation`` says which windows are tried, and which is the baseline. Positions below ``window``
    have nothing to lose and come from one pass. The positions from there on are taken ``stride`` at a time; each group
    is scored by one fresh pass over the ``window`` positions that end with it. So a position sees at least
    ``window - stride + 1`` and at most ``window`` tokens.

    Args:
        window: tokens that the model may see, at least 1.
        stride: positions scored per pass, from 1 to ``window - prefix``; default a quarter of the window.
        start: first position to score. The passes before it are not run; every position from there on sees the same
            tokens as without ``start``.
        prefix: leading tokens of the text that every window keeps in front (1 for a BOS token), below ``window``.

    Returns:
        Nats per token, float32, on the CPU, for the positions ``start`` to ``tokens - 2``.

    Raises:
        InvalidParameterError: an argument out of range.
        IncompatibleError: as in ``loss_by_position``.

    Source: Press et al., arXiv:2012.15832 (sliding window evaluation), with a window that is always full.
    """
    check_token_ids(input_ids)
    stride = max(1, (window - prefix) // 4) if stride is None else stride
    windows = truncation_windows(input_ids.shape[1] - 1, window=window, stride=stride, start=start, prefix=prefix)
    return torch.cat([each.losses(model, input_ids, chunk=chunk, cached=cached) for each in windows], dim=1)


@dataclass(frozen=True)
class Window:
    """One pass over a stretch of a text, and which of its losses count.

    The last token predicts nothing and is not run, so a dynamic method sees a text one token shorter than published
    code does.

    Args:
        prefix: leading tokens of the text, placed in front of the stretch.
        chosen: spans of the text, begin and end of each, placed between the two.
    """

    begin: int
    end: int
    scored: int
    prefix: int = 0
    chosen: tuple[tuple[int, int], ...] = ()

    @property
    def positions(self) -> int:
        """Positions that the pass runs over."""
        return self.prefix + sum(end - begin for begin, end in self.chosen) + self.end - self.begin - 1

    def losses(self, model: nn.Module, input_ids: Int[Tensor, "batch tokens"], **options: Any) -> Tensor:
        """Return the losses that count, [batch, scored], in nats per token.

        ``loss_by_position`` describes the options and the errors.
        """
        spans = [(0, self.prefix), *self.chosen, (self.begin, self.end)]
        tokens = torch.cat([input_ids[:, slice(*span)] for span in spans], dim=1)
        return loss_by_position(model, tokens, start=self.positions - self.scored, **options)


def truncation_windows(
    positions: int, *, window: int, stride: int, start: int = 0, prefix: int = 0
) -> tuple[Window, ...]:
    """Lay out a sliding window: every position is scored once, by a window that is always full.

    Positions below ``window`` come from one pass. Those from there on are taken ``stride`` at a time, each group by the
    window that ends with it.

    Args:
        positions: Positions of the text, one fewer than its tokens.
        window: positions that the model may see, at least 1.
        stride: positions scored per pass, from 1 to ``window - prefix``.
        start: first position to score. The passes before it are left out; every position sees the same tokens as
            without ``start``.
        prefix: leading tokens of the text that every window keeps in front, below ``window``.

    Raises:
        InvalidParameterError: an argument out of range.

    Source: Press et al., arXiv:2012.15832, appendix B.
    """
    for name, value, low, high in (
        ("window", window, 1, None),
        ("prefix", prefix, 0, window - 1),
        ("stride", stride, 1, window - prefix),
        ("start", start, 0, positions - 1),
    ):
        if value < low or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"from {low} to {high}"
            raise InvalidParameterError(f"{name} must be {allowed} tokens, found {value}.")
    windows = []
    if start < window:
        first = min(window, positions)
        windows.append(Window(0, first + 1, first - start))
    # Groups lie on the grid of the window, wherever the first position of interest is.
    for begin in range(window + max(0, start - window) // stride * stride, positions, stride):
        stop = min(begin + stride, positions)
        windows.append(Window(stop - window + prefix, stop + 1, stop - max(begin, start), prefix))
    return tuple(windows)
