"""Beginnings of prompts that a server has read, for requests that begin alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ctxext.caches.prefix import beginning, common, new_cache, shorten, why_no_prefix
from ctxext.core.subject import Subject

LEAST = 16
"""Tokens of a common beginning below which a prompt is read anew."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens of a prompt and its answer, and the cache that holds them.

    Args:
        owner: salt and key that a request must share to go on from it.
    """

    tokens: list[int]
    cache: Any
    owner: Hashable

    def begins(self, prompt: list[int], owner: Hashable) -> int:
        """Return the tokens from which a prompt of an owner may go on; 0 for too few. One is left to read."""
        length = min(common(self.tokens, prompt), len(prompt) - 1) if self.owner == owner else 0
        return length if length >= LEAST else 0

    @property
    def memory(self) -> int:
        """Bytes of keys and values."""
        layers = [part for layer in self.cache.layers for part in (layer, getattr(layer, "near", None)) if part]
        return sum(part.nbytes for layer in layers for part in (layer.keys, layer.values) if part is not None)


class Prefixes:
    """Caches of prompts and answers; the least recently used fall first. One thread takes and puts.

    Args:
        most: tokens that are kept, at most.
        window: tokens that a cache has room for; None for one that grows.
    """

    def __init__(self, subject: Subject, most: int, window: int | None = None) -> None:
        self.model, self.most, self.window, self.kept = subject.model, most, window, list[Prefix]()
        self.why_not = why_no_prefix(subject) if most else "--keep-tokens is 0"
        on_cuda = self.model.device.type == "cuda"
        self.memory = torch.cuda.mem_get_info(self.model.device)[0] // 2 if on_cuda else None

    def take(self, prompt: list[int], owner: Hashable) -> tuple[Any, int]:
        """Return a cache of the beginning of a prompt, and the number of its tokens; 0 for an empty one.

        At least one token of the prompt is left to read.
        """
        lengths = {prefix: length for prefix in self.kept if (length := prefix.begins(prompt, owner))}
        if not lengths:
            return self.empty(), 0
        prefix = max(lengths, key=lambda prefix: lengths[prefix])
        length = lengths[prefix]
        self.kept.remove(prefix)
        if 2 * length < len(prefix.tokens):  # a longer text, which others may go on from
            self.kept.append(prefix)  # used last
            part = beginning(prefix.cache, length)
            return (self.empty(), 0) if part is None else (part, length)
        return self.cut(prefix.cache, length)

    def empty(self) -> Any:
        """Return an empty cache."""
        return new_cache(self.model, self.window)

    def cut(self, cache: Any, length: int) -> tuple[Any, int]:
        """Return a cache cut to so many tokens, and their number; an empty one where it cannot be cut."""
        return (cache, length) if shorten(cache, length) else (self.empty(), 0)

    def put(self, tokens: Sequence[int], cache: Any, owner: Hashable) -> None:
        """Keep what a request has read and written; ``tokens`` may have more than the cache."""
        self.kept.append(Prefix(list(tokens[: int(cache.get_seq_length())]), cache, owner))
        while self.kept and (self.tokens > self.most or (self.memory is not None and self.bytes > self.memory)):
            self.kept.pop(0)

    @property
    def tokens(self) -> int:
        """Number of tokens that are kept."""
        return sum(len(prefix.tokens) for prefix in [*self.kept])

    @property
    def bytes(self) -> int:
        """Memory of all that is kept."""
        return sum(prefix.memory for prefix in [*self.kept])

    @property
    def facts(self) -> dict[str, Any]:
        """Numbers of texts, tokens and bytes that are kept, for ``/health``, and the reason if there are none."""
        return {"texts": len(self.kept), "tokens": self.tokens, "bytes": self.bytes, "why_none": self.why_not}


class GraphPrefixes(Prefixes):
    """The one cache, with room for a window, over which steps run as graphs: it keeps what was read last."""

    def take(self, prompt: list[int], owner: Hashable) -> tuple[Any, int]:
        """Return the cache, and the number of tokens in it that begin the prompt."""
        last = self.kept.pop() if self.kept else Prefix([], self.empty(), owner)
        return self.cut(last.cache, 0 if self.why_not else last.begins(prompt, owner))

    def put(self, tokens: Sequence[int], cache: Any, owner: Hashable) -> None:
        """Keep the cache, and what a request has read and written where that may be kept."""
        self.kept = [Prefix([] if self.why_not else list(tokens[: int(cache.get_seq_length())]), cache, owner)]
