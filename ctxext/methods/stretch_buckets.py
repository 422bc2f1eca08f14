"""T5's buckets of distances, reaching further."""

from __future__ import annotations

from dataclasses import dataclass

from ctxext.methods.base import BucketMethod
from ctxext.spec import BucketSpec


@dataclass(frozen=True, kw_only=True)
class StretchBuckets(BucketMethod):
    """Let the buckets of far distances, which grow in size, grow faster: the last begins ``factor`` times further back.

    Pick it for a T5 that must distinguish distances beyond 128 tokens, its last bucket: T5 reads texts of any length
    already, but cannot tell how far back more distant tokens are. Near distances (up to 7
    tokens each way in an encoder, 15 in a decoder) keep a bucket each, unchanged; the distances between get coarser,
    which costs something without training. The method is not interpolation, which would divide near distances as well,
    and changes no base or frequency. NTK is the rotary method that comes nearest.

    A softmax over more keys is flatter. To counter that, ``temperature`` sharpens the self-attention whose buckets are
    stretched, without training (Chi et al.). The authors choose the temperature at which attention on longer texts is
    as sharp as it was at the trained length, by the mean of its largest probability or by its entropy. A temperature
    below 1 changes short texts too: leave it at 1, unless you have measured a gain on longer texts.

    Args:
        factor: target_length / trained_length, and the new ``relative_attention_max_distance`` over the old one, which
            is rounded to whole tokens. Dimensionless, at least 1.
        temperature: divisor of the attention scores, the buckets' scores included. Above 0, at most 1, which changes
            nothing. 0.5, 0.25 ... are exact; other values round each weight once.

    Source: Raffel et al., arXiv:1910.10683, section 2.1, for the buckets; nothing is published about stretching them.
        Authors' code of the buckets: tensorflow/mesh@0cb87fe, mesh_tensorflow/transformer/transformer_layers.py. The
        temperature: Chi, Fan and Rudnicky, arXiv:2311.00684.
    """

    name = "stretch_buckets"
    summary = "T5: the far buckets of distances reach further"
    source = "arXiv:1910.10683"

    def max_distance(self, spec: BucketSpec) -> int:
        return round(spec.max_distance * self.factor)
