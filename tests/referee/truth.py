"""What a text's logits are: a decoder in float64, written out, whose positions are the formulas of the papers.

Nothing here comes from ctxext. Models of other structures are held to themselves: one call for each text, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers import PreTrainedModel

from tests._formulas import dense_attention, plain, spectrum

L = 32
"""Trained length of every model, in tokens."""


@dataclass(frozen=True)
class Relation:
    """How a query reaches a key at or before it.

    Args:
        apart: relative position of each pair, ``[query, key]`` or ``[query, key, pair of dimensions]``.
        inv_freq: radians per token.
        bias: added to the scores; ``[query, key]``, or with a dimension for heads in front.
        sharp: factor on the scores of each query.
    """

    apart: Tensor
    inv_freq: Tensor
    bias: Any = 0.0
    sharp: Any = 1.0


Rule = Callable[[int, int, int], Relation]
"""The relation in a text of so many tokens, fitted to a length, of a key head counted through all layers."""


def pairs(length: int) -> tuple[Tensor, Tensor]:
    """Positions of queries and of keys, to broadcast."""
    at = torch.arange(length)
    return at[:, None], at[None]


def by_frequencies(kind: Callable[[float], tuple[Tensor, float]]) -> Rule:
    """Plain distances under other frequencies; ``kind`` is of the length over the trained length, at least 1."""

    def rule(length: int, fitted: int, _: int) -> Relation:
        i, j = pairs(length)
        inv_freq, scale = kind(max(fitted / L, 1.0))
        return Relation((i - j).double(), inv_freq, sharp=scale**2)

    return rule


def ntk(width: int, stretch: float) -> Tensor:
    """Frequencies of a base raised by a stretch."""
    return plain(width, 1e4 * stretch ** (width / (width - 2)))


def yarn(width: int, factor: float) -> tuple[Tensor, float]:
    """Frequencies and scale of cos and sin."""
    if factor == 1:
        return plain(width), 1.0
    return spectrum({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": L}, width)


FREQUENCIES: dict[str, Callable[[int, dict[str, Any], float], tuple[Tensor, float]]] = {
    "pi": lambda width, how, s: (plain(width) / how["factor"], 1.0),
    "ntk": lambda width, how, s: (ntk(width, how["factor"]), 1.0),
    "yarn": lambda width, how, s: yarn(width, how["factor"]),
    "nope": lambda width, how, s: (plain(width) * 0, 1.0),
    "dynamic_ntk": lambda width, how, s: (ntk(width, how["factor"] * s - (how["factor"] - 1)), 1.0),
    "dynamic_pi": lambda width, how, s: (plain(width) / s, 1.0),
    "dynamic_yarn": lambda width, how, s: yarn(width, s),
}


def sharpness(length: int, how: dict[str, Any]) -> Any:
    """Factor on the scores of each query, by the temperature of a method."""
    at = torch.arange(1, length + 1).double()[:, None]
    kind = how.get("temperature", "none")
    if kind == "yarn":
        return (0.1 * math.log(how["factor"]) + 1) ** 2
    if kind == "growing":
        return (0.1 * (at / L).clamp(min=1).log() + 1) ** 2
    return (at.log() / math.log(L)).clamp(min=1) if kind == "logn" else 1.0


def self_extend(i: Tensor, j: Tensor, how: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Grouped positions beyond a window, and the weight of far keys."""
    target, window, sinks = int(how["factor"] * L), how["window"], how.get("sinks", 4)
    reach = max(int(7 / 8 * L), (window + L) // 2)
    group = next(g for g in range(1, target + 1) if (target - 1) // g + window - window // g <= reach)
    thinning = 0.5 * min(max(math.log2(how["factor"]) - 1, 0), 1)
    far = i - j >= window
    if how.get("exact", True):
        far = far & (i >= L)
    apart = torch.where(far, i // group + window - window // group - j // group, i - j)
    return apart.double(), torch.where(far & (j >= sinks), -thinning * math.log(group), 0.0).double()


def rerope(i: Tensor, j: Tensor, how: dict[str, Any]) -> tuple[Tensor, float]:
    """One position beyond a window, or with a leak nearly so."""
    far = i - j >= how["window"]
    far = far & (i >= L) if how.get("exact", True) else far
    leak = how.get("leak", 0.0)
    return torch.where(far, leak * (i - j) + how["window"] * (1 - leak), (i - j).double()), 0.0


def dual_chunk(i: Tensor, j: Tensor, how: dict[str, Any]) -> tuple[Tensor, float]:
    """Positions that begin again in each chunk."""
    size = how["chunk"] - how["local"]
    back = i // size - j // size
    query = torch.where(
        back == 0, i % size, torch.where(back == 1, (i % size + size).clamp(max=how["chunk"]), how["chunk"])
    )
    return (query - j % size).double(), 0.0


def string(i: Tensor, j: Tensor, how: dict[str, Any]) -> tuple[Tensor, float]:
    """One shift of all distances from ``shift`` on."""
    return torch.where(i - j < how["shift"], i - j, i - j - how["shift"] + how["local"]).double(), 0.0


def dpe(i: Tensor, j: Tensor, how: dict[str, Any]) -> tuple[Tensor, float]:
    """Groups of another size for each frequency."""
    group = torch.tensor(how["groups"])
    far = ((i - j >= how["window"]) & (i >= L))[..., None]
    i, j, window = i[..., None], j[..., None], how["window"]
    return torch.where(far, i // group + window - window // group - j // group, i - j).double(), 0.0


def streaming(i: Tensor, j: Tensor, how: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The first tokens and the nearest ones."""
    near = i - j < how["window"]
    near = near | (i < L) if how.get("exact", False) else near
    first = (j < how["sinks"]) & ~near
    apart = torch.where(first, how["sinks"] + how["window"] - 1 - j, i - j).double()
    return apart, torch.where(near | first, 0.0, -math.inf).double()


REMAPS: dict[str, Callable[..., tuple[Tensor, Any]]] = {
    "self_extend": self_extend,
    "rerope": rerope,
    "dual_chunk": dual_chunk,
    "string": string,
    "dpe": dpe,
    "streaming": streaming,
}


def remapped(name: str, how: dict[str, Any], start: tuple[Tensor, float]) -> Rule:
    """Other distances under the frequencies from which the method starts, which have a scale of cos and sin."""
    inv_freq, scale = start

    def rule(length: int, _: int, head: int) -> Relation:
        i, j = pairs(length)
        apart, bias = REMAPS[name](i, j, how)
        return Relation(apart, inv_freq, bias, sharpness(length, how) * scale**2)

    return rule


def retrieval_heads(how: dict[str, Any], start: tuple[Tensor, float]) -> Rule:
    """Some heads far, the others the first and the nearest tokens; only the far ones have a temperature."""
    far = remapped(how.get("far", "self_extend"), how | {"window": how.get("far_window", L // 2)}, start)
    near = remapped("streaming", {"exact": True} | how | {"temperature": "none"}, start)
    return lambda length, fitted, head: (far if head in how["heads"] else near)(length, fitted, head)


def alibi(how: dict[str, Any], width: int) -> Rule:
    """No rotation, and a slope of each of 4 heads: 1/4, 1/16, 1/64, 1/256."""

    def rule(length: int, _: int, head: int) -> Relation:
        i, j = pairs(length)
        slopes = 2.0 ** -torch.arange(2, 10, 2).double()
        return Relation((i - j).double(), torch.zeros(width // 2).double(), -slopes[:, None, None] * (i - j))

    return rule


def rule_of(name: str, how: dict[str, Any], width: int, scaled: dict[str, Any]) -> Rule | None:
    """The rule of a method on a checkpoint that is ``scaled`` by a rope dict; None where there is no formula here."""
    start = spectrum(scaled, width)
    if name == "none":
        return by_frequencies(lambda s: start)
    if name in FREQUENCIES:
        return by_frequencies(lambda s: FREQUENCIES[name](width, how, s))
    if name in REMAPS:
        return remapped(name, how, start)
    if name == "retrieval_heads":
        return retrieval_heads(how, start)
    return alibi(how, width) if name == "alibi" else None


class Decoder:
    """A Llama in float64, also with biases (Qwen2) or normed queries and keys (Qwen3)."""

    def __init__(self, model: PreTrainedModel, rule: Rule) -> None:
        self.weights = {name: weight.detach().double() for name, weight in model.state_dict().items()}
        self.config, self.rule = model.config, rule

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return x @ self.weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        return (
            x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]
        )

    def logits(self, text: Tensor, fitted: int) -> Tensor:
        """Return ``[tokens, vocabulary]``."""
        x = self.weights["model.embed_tokens.weight"][text]
        for layer in range(self.config.num_hidden_layers):
            at = f"model.layers.{layer}"
            x = x + self._attention(f"{at}.self_attn", layer, self._norm(f"{at}.input_layernorm", x), fitted)
            y = self._norm(f"{at}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{at}.mlp.{side}_proj", y) for side in ("gate", "up"))
            x = x + self._linear(f"{at}.mlp.down_proj", silu(gate) * up)
        return self._linear("lm_head", self._norm("model.norm", x))

    def _attention(self, at: str, layer: int, x: Tensor, fitted: int) -> Tensor:
        length, width, groups = len(x), self.config.head_dim, self.config.num_key_value_heads
        q, k, v = (self._linear(f"{at}.{side}_proj", x).view(length, -1, width).transpose(0, 1) for side in "qkv")
        q, k, outs = self._norm(f"{at}.q_norm", q), self._norm(f"{at}.k_norm", k), []
        ahead = torch.ones(length, length).triu(1).bool()[..., None]
        for group, (queries, *others) in enumerate(zip(*(side.chunk(groups) for side in (q, k, v)), strict=True)):
            relation = self.rule(length, fitted, layer * groups + group)
            apart = relation.apart.view(length, length, -1).masked_fill(ahead, math.nan)
            weight = (relation.bias + torch.zeros(length, length).double()).exp()
            how = {"scale": width**-0.5, "weight": weight.chunk(groups)[group] if weight.ndim == 3 else weight}
            outs.append(dense_attention(queries * relation.sharp, *others, apart, relation.inv_freq, **how))
        return self._linear(f"{at}.o_proj", torch.cat(outs).transpose(0, 1).flatten(1))

    def gradients(self, text: Tensor, fitted: int, names: list[str]) -> list[Tensor]:
        """Return the gradients of the mean loss of the next tokens."""
        weights = [self.weights[name].requires_grad_() for name in names]
        loss = cross_entropy(self.logits(text, fitted)[:-1], text[1:])
        found = torch.autograd.grad(loss, weights)
        for weight in weights:
            weight.requires_grad_(requires_grad=False)
        return list(found)


@dataclass
class Itself:
    """A model of another structure, which reads each text in one call without a cache, alone."""

    model: PreTrainedModel

    @torch.no_grad()
    def logits(self, text: Tensor, fitted: int) -> Tensor:
        more = {"ctxext_length": fitted} if fitted > len(text) else {}
        return self.model(text[None], use_cache=False, **more).logits[0].double()
