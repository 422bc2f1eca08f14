"""The loss of a frozen model as a function of its frequencies, and its gradient, for a search of frequencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.choosing.learned import LearnedRotation, learn_rotation, turns
from ctxext.core.edits import Edits
from ctxext.core.rotary import RotarySite
from ctxext.core.subject import base_model, text_of
from ctxext.errors import IncompatibleError
from ctxext.measuring.forward import head_chunk
from ctxext.measuring.statistics import check_finite
from ctxext.methods import RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.methods.longrope import LongRoPE
from ctxext.spec import RopeSpec
from ctxext.training.loss import Pieces
from ctxext.training.memory import recompute_layers

# Nats that it costs to divide the frequencies that did not turn once in training by something else than the factor,
# per squared logarithm and in the mean over them: a factor of two is 0.005. The loss alone would let them drift to
# where no text of this length shows what they do, and a longer one would.
PENALTY = 0.01
# Decimals of a divisor that are kept: more than float32 tells apart.
DECIMALS = 8

# Logarithms of what each frequency is divided by, and last that of what cos and sin are multiplied by; float64.
Vector = Float[Tensor, " unknowns"]


def vector_of(method: RopeMethod, rope: RopeSpec, length: int) -> Vector:
    """Return the vector of a method that is one set of frequencies, none of them 0."""
    frequencies = method.frequencies(rope, length)
    divisors = plain_inv_freq(rope) / frequencies.inv_freq
    return torch.cat([divisors, torch.tensor([frequencies.attention_scale], dtype=torch.float64)]).log()


def as_method(vector: Vector, factor: float) -> LongRoPE:
    """Return a vector as a method that plain transformers loads: one set of factors, for short texts and long ones."""
    *divisors, scale = (round(value, DECIMALS) for value in vector.exp().tolist())
    return LongRoPE(factor=factor, short_factor=tuple(divisors), long_factor=tuple(divisors), attention_factor=scale)


def learns_scale(model: nn.Module) -> bool:
    """Return whether cos and sin have a scale to search: latent attention multiplies whole scores by a constant."""
    return not hasattr(text_of(base_model(model).config), "qk_rope_head_dim")


@dataclass(frozen=True, eq=False)
class Example:
    """Texts of one length and how much the loss of each of their tokens counts."""

    input_ids: Int[Tensor, "batch tokens"]
    weights: Float[Tensor, "batch positions"]

    @classmethod
    def mean(cls, input_ids: Tensor) -> Example:
        """Return an example in which all tokens count alike."""
        counted = input_ids[:, 1:].shape
        return cls(input_ids, torch.full(counted, 1 / counted.numel()))


@dataclass(eq=False)
class Landscape:
    """A model whose rotation is a vector, inside a ``with``; all of it is afterwards as it was.

    The model stays in evaluation mode and its weights are frozen, so that a gradient is of the vector alone. Each layer
    is computed again in the backward pass, and the logits exist for a chunk of the text at a time.

    Args:
        model: patched by ``as_method`` of a vector of zeros, so that it has its own frequencies and reaches the target.
    """

    model: nn.Module
    sites: Sequence[RotarySite]
    stretch: float
    rotation: LearnedRotation = field(init=False)
    edits: Edits = field(init=False, default_factory=Edits)

    def __enter__(self) -> Landscape:
        base = base_model(self.model)
        zeros = torch.zeros(self.sites[0].spec.rotary_dim // 2 + 1, dtype=torch.float64)
        self.rotation = LearnedRotation(zeros[:-1], zeros[-1])
        with self.edits:
            learn_rotation(base, self.sites, self.rotation, self.edits)
            recompute_layers(base, self.edits)
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    self.edits.set(parameter, "requires_grad", False)
        return self

    def __exit__(self, *error: object) -> None:
        self.edits.undo()

    @torch.no_grad()
    def loss(self, vector: Vector, examples: Sequence[Example]) -> float:
        """Return the mean loss of examples, in nats."""
        return sum(self._loss(vector, example).item() for example in examples) / len(examples)

    def gradient(self, vector: Vector, examples: Sequence[Example]) -> tuple[float, Vector]:
        """Return the mean loss of examples plus the penalty, in nats, and its gradient; one example at a time.

        Raises:
            IncompatibleError: no gradient comes through the model, or no finite one.
        """
        with torch.inference_mode(False), torch.enable_grad():
            unknowns = vector.detach().clone().requires_grad_()
            total = self._penalty(unknowns)
            (gradient,) = torch.autograd.grad(total, unknowns)
            value = total.item()
            for example in examples:
                loss = self._loss(unknowns, example) / len(examples)
                part = torch.autograd.grad(loss, unknowns, allow_unused=True)[0] if loss.requires_grad else None
                if part is None:
                    raise IncompatibleError(
                        f"No gradient comes through {type(base_model(self.model)).__name__} to its frequencies. "
                        f"Choose without --search."
                    )
                value, gradient = value + loss.item(), gradient + part
        check_finite(torch.tensor([value, *gradient.tolist()]), "a step of the search")
        return value, gradient

    def _loss(self, vector: Vector, example: Example) -> Tensor:
        base = base_model(self.model)
        self.rotation.log_divisors, self.rotation.log_scale = vector[:-1], vector[-1]
        ids = example.input_ids.to(base.device)
        given = {"input_ids": ids[:, :-1], "use_cache": False}
        pieces = Pieces(base, given, ids[:, 1:], example.weights)
        loss: Tensor = pieces.at_once(max(1, head_chunk(base) // len(ids)))
        return loss

    def _penalty(self, vector: Vector) -> Tensor:
        site = self.sites[0]
        slow = turns(site, site.spec.trained_length) < 1
        if not slow.any():
            return (vector * 0).sum()
        return PENALTY * (vector[:-1][slow] - math.log(self.stretch)).square().mean()


def require_searchable(model: nn.Module) -> None:
    """Raise, before anything is read, where gradients of a long text cannot be computed on a model.

    Raises:
        IncompatibleError: the model has quantised weights, weights of ``torch.inference_mode``, or no layers that can
            be computed again.
    """
    base = base_model(model)
    name = type(base).__name__
    quantised = getattr(base.config, "quantization_config", None) is not None
    if quantised or not all(parameter.is_floating_point() for parameter in base.parameters()):
        raise IncompatibleError(
            f"The weights of this {name} are quantised, and gradients do not pass all of their kernels. Choose without "
            f"--search, or search on the checkpoint that it was made of: frequencies are the same for both."
        )
    if any(parameter.is_inference() for parameter in base.parameters()):
        raise IncompatibleError(
            f"This {name} was loaded inside torch.inference_mode(), which forbids gradients for good. Load it outside, "
            f"or choose without --search."
        )
    with Edits() as edits:
        recompute_layers(base, edits)
    edits.undo()
