"""T5's buckets of distances, reaching further."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ctxext.methods.base import BucketMethod
from ctxext.spec import BucketSpec


@dataclass(frozen=True, kw_only=True)
class StretchBuckets(BucketMethod):
    """Let the buckets of far distances, which grow in size, grow faster: the last begins ``factor`` times further back.

    Pick it for a T5 that must distinguish distances beyond 128 tokens, its last bucket: T5 reads texts of any length
    already, but cannot tell how far back more distant tokens are. Near distances (up to 7
    tokens each way in an encoder, 15 in a decoder) keep a bucket each and are read as before; those between get
    coarser, which costs something without training. It is no interpolation, which would divide near distances as well,
    and it changes no base or frequency, so it has a name of its own; of the rotary methods NTK comes nearest.

    A softmax over more keys is flatter. Against that, ``temperature`` sharpens the self-attention whose buckets are
    stretched, without training (Chi et al.). The authors choose the one at which attention on the longer texts is as
    sharp as it was at the trained length, by the mean of its largest probability or by its entropy. It sharpens short
    texts too, which are then not read as before: leave it at 1, unless longer texts that you have measured gain by it.

    Args:
        factor: target_length / trained_length, and the new ``relative_attention_max_distance`` over the old one, which
            is rounded to whole tokens. Dimensionless, at least 1.
        temperature: what the scores, with the buckets' in them, are divided by. Above 0, at most 1, at which they stay
            as they are. 0.5, 0.25 ... are exact; others round each weight that they change once.

    Source: Raffel et al., arXiv:1910.10683, section 2.1, for the buckets; nothing is published about stretching them.
        Authors' code of the buckets: tensorflow/mesh@0cb87fe, mesh_tensorflow/transformer/transformer_layers.py. The
        temperature: Chi, Fan and Rudnicky, arXiv:2311.00684.
    """

    name: ClassVar[str] = "stretch_buckets"
    summary: ClassVar[str] = "T5: the far buckets of distances reach further"
    source: ClassVar[str] = "arXiv:1910.10683"

    def max_distance(self, spec: BucketSpec) -> int:
        return round(spec.max_distance * self.factor)
