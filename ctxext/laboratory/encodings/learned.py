"""One learned vector per position, added to the token embeddings: GPT-2's and BERT's encoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctxext.errors import InvalidParameterError
from ctxext.methods.encoding import Encoding, EncodingMethod, EncodingSpec
from ctxext.methods.parameters import checked_rows


@dataclass(frozen=True, kw_only=True)
class Learned(EncodingMethod):
    """Add a learned vector for each position to what the first layer reads, instead of rotation.

    Pick it as a baseline, or to see what the methods for learned tables (tile, hierarchical ...) start from. The cost:
    there is a vector for every position up to the target length and none beyond, vectors that no text of the training
    reached are noise, and it takes many more steps than relative encodings until the order of tokens is used at all.
    The model needs training.

    Args:
        factor: target_length / trained_length. Dimensionless, at least 1. There are ``target_length`` vectors.

    Source: Gehring et al., arXiv:1705.03122, sections 3.1 and 3.5 (drawn as widely as token embeddings). As in GPT-2:
        openai/gpt-2@c2dae27, src/model.py, which draws them half as widely.
    """

    name = "learned"
    summary = "one learned vector per position, added to the embeddings"
    source = "arXiv:1705.03122"
    form = "input"

    def build(self, spec: EncodingSpec) -> Encoding:
        return _PositionVectors(checked_rows(self.name, self.target_length(spec.trained_length)), spec)


class _PositionVectors(Encoding):
    def __init__(self, rows: int, spec: EncodingSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, spec.hidden_size) * spec.embedding_std)

    def added(self, positions: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        rows = len(self.weight)
        if not torch.compiler.is_compiling() and positions.device.type != "meta" and int(positions.max()) >= rows:
            raise InvalidParameterError(
                f"position {int(positions.max()):,}: this model has learned vectors for {rows:,} positions. Give it "
                f"shorter texts, or patch it with a larger factor before it is trained."
            )
        return self.weight[positions.to(self.weight.device)]
