"""Texts to measure on: documents from files, data sets or standard input, and their tokens.

Reading (``read_documents``) and tokenising (``tokenise``) know nothing of each other, and reading yields one document
at a time, so that a corpus larger than memory can be read too. Documents are never joined: a model that attends
across the seam between two texts is measured on something that nobody wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ctxext.errors import InvalidParameterError, UnknownNameError
from ctxext.files import digest
from ctxext.texts.conversations import chat_tokens
from ctxext.texts.documents import Document

BOS_CHOICES = ("auto", "none", "bos", "eos")


@dataclass(frozen=True, eq=False)
class TokenisedDocument:
    """The tokens of one document, or of a stretch of it.

    Args:
        prefix: Leading tokens that are not of the text (a BOS token).
        answers: Mask of the tokens of a conversation that an assistant is to write; None for a text.
    """

    name: str
    input_ids: Int[Tensor, "1 tokens"]
    prefix: int
    answers: Bool[Tensor, "1 tokens"] | None = None

    @property
    def tokens(self) -> int:
        """Tokens, the prefix among them."""
        return int(self.input_ids.shape[1])

    @property
    def answered(self) -> int:
        """Tokens of answers that are predicted, which the first token of all is not; 0 for a text."""
        return 0 if self.answers is None else int(self.answers[:, 1:].sum())

    @cached_property
    def sha256(self) -> str:
        """The first 12 hexadecimal digits of a hash of the token ids, as decimal numbers with spaces between."""
        return digest(" ".join(map(str, self.input_ids[0].tolist())))

    def take(self, tokens: int, *, skip: int = 0) -> TokenisedDocument:
        """Return the prefix and the tokens after the first ``skip`` of the text, ``tokens`` in total.

        Raises:
            InvalidParameterError: if the text is too short; the message names the tokens found and needed.
        """
        if skip < 0 or tokens <= self.prefix:
            raise InvalidParameterError(
                f"A stretch needs skip >= 0 and more than its {self.prefix} prefix tokens; found skip={skip}, "
                f"tokens={tokens}."
            )
        present, needed = self.tokens - self.prefix, skip + tokens - self.prefix
        if present < needed:
            raise InvalidParameterError(
                f"The text {self.name!r} has {present:,} tokens; this length needs {needed:,}"
                f"{f' (the first {skip:,} are skipped)' if skip else ''}. Use a longer text or a smaller --length."
            )
        places = torch.cat([torch.arange(self.prefix), torch.arange(self.prefix + skip, self.prefix + needed)])
        answers = None if self.answers is None else self.answers[:, places]
        return replace(self, input_ids=self.input_ids[:, places], answers=answers)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents made ready for one measurement.

    Args:
        prefix: Words for the tokens in front of each document.
        read: Number of documents that were read; the missing ones were too short, or copies.
        copies: Number of documents left out since an earlier one has the same tokens.
    """

    documents: tuple[TokenisedDocument, ...]
    prefix: str
    read: int
    copies: int = 0

    def cut(self, tokens: int) -> Corpus:
        """Cut each document to at most ``tokens`` tokens, prefix included."""
        return replace(
            self, documents=tuple(document.take(min(tokens, document.tokens)) for document in self.documents)
        )

    @property
    def sha256(self) -> str:
        """The first 12 hexadecimal digits of a hash of all documents' digests in order."""
        return digest(" ".join(document.sha256 for document in self.documents))

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return sum(document.tokens for document in self.documents)


def corpus_of(
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    tokens: int,
    whole: bool = False,
    shorter: bool = False,
    skip: int = 0,
    limit: int | None = None,
    bos: str = "auto",
) -> Corpus:
    """Tokenise documents and keep the long enough ones.

    Args:
        documents: Documents, such as ``read_documents`` yields; not read further than ``limit`` needs.
        tokens: Tokens that each document must have after the first ``skip``, prefix included; at least 2. The rest is
            cut off.
        whole: True to keep the rest too (a sliding window reads on).
        shorter: True to keep conversations with fewer tokens too; conversations without an answer are left out.
        skip: Tokens left out at the start of each text (title pages, lists of persons).
        limit: Number of documents to take, the first that are long enough; None takes all.

    Raises:
        InvalidParameterError: no document at all, none long enough, or fewer long enough than ``limit``.
    """
    if tokens < 2 or skip < 0 or (limit is not None and limit < 1):
        raise InvalidParameterError(
            f"A corpus needs documents of at least 2 tokens, skip >= 0 and a limit of at least 1 document; found "
            f"tokens={tokens}, skip={skip}, limit={limit}."
        )
    prefix = None if bos == "auto" else prefix_for(tokenizer, bos)
    kept: list[TokenisedDocument] = []
    read, longest, silent, copies = 0, 0, 0, 0
    seen: set[str] = set()
    for document in documents:
        read += 1
        tokenised = tokenise(document, tokenizer, prefix=prefix)
        present = tokenised.tokens - skip
        longest = max(longest, present)
        # A short conversation needs two tokens behind the prefix: one to predict, and one to predict it from.
        may_be_short = shorter and tokenised.answers is not None
        if present < (tokenised.prefix + 2 if may_be_short else max(tokens, tokenised.prefix + 1)):
            continue
        taken = tokenised.take(present if whole else min(tokens, present), skip=skip)
        if may_be_short and not taken.answered:
            silent += 1
            continue
        # Documents that differ only in the tokens cut off are copies too, so the hash is taken after the cut.
        if taken.sha256 in seen:
            copies += 1
            continue
        seen.add(taken.sha256)
        kept.append(taken)
        if len(kept) == limit:
            break
    if not read:
        raise InvalidParameterError("The corpus is empty: no document with any text in it was found.")
    if not kept or (limit is not None and len(kept) < limit):
        raise InvalidParameterError(
            f"{len(kept)} of {read} documents have the {tokens:,} tokens asked for"
            f"{f' after the first {skip:,}, which are skipped' if skip else ''}"
            f"{f', and {limit} are wanted' if kept else f'; the longest has {longest:,}'}"
            f"{f'; {silent} conversations have no answer there' if silent else ''}"
            f"{f'; {copies} are copies of others' if copies else ''}. "
            f"Ask for {'fewer documents or ' if kept else ''}a smaller length, or give longer texts."
        )
    labels = (prefix_label(tokenizer, document.input_ids[0, : document.prefix].tolist()) for document in kept)
    return Corpus(tuple(kept), " or ".join(dict.fromkeys(labels)), read, copies)


def tokenise(document: Document, tokenizer: Any, *, prefix: Sequence[int] | None = None) -> TokenisedDocument:
    """Tokenise a whole document, a conversation by the tokenizer's chat template.

    Args:
        prefix: Token ids to put in front; None for the tokenizer's or the chat template's default.

    Raises:
        InvalidParameterError: a conversation that the tokenizer cannot write, see ``chat_tokens``.
    """
    front = special_prefix(tokenizer) if prefix is None else list(prefix)
    if not document.messages:
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        return TokenisedDocument(document.name, torch.tensor([[*front, *ids]], dtype=torch.long), len(front))
    ids, answers = chat_tokens(document, tokenizer)
    own = special_prefix(tokenizer)
    own = own if ids[: len(own)] == own else []  # a template may begin with it, or leave it out
    front = own if prefix is None else front
    row = torch.tensor([[*front, *ids[len(own) :]]], dtype=torch.long)
    is_answer = torch.tensor([[*(False for _ in front), *answers[len(own) :]]])
    return TokenisedDocument(document.name, row, len(front), is_answer)


def prefix_for(tokenizer: Any, bos: str) -> list[int]:
    """Return the token ids to put in front of a document.

    Args:
        bos: Name of the tokens: ``auto`` for the tokens that the tokenizer puts in front by default, ``none``, ``bos``
            or ``eos`` for its token of that name, or any one token of its vocabulary, such as ``<|endoftext|>``.

    Raises:
        InvalidParameterError: the tokenizer has no such special token.
        UnknownNameError: no such token.
    """
    if bos == "auto":
        return special_prefix(tokenizer)
    if bos == "none":
        return []
    if bos in ("bos", "eos"):
        token = getattr(tokenizer, f"{bos}_token_id")
        if token is None:
            raise InvalidParameterError(
                f"{type(tokenizer).__name__} has no {bos} token. Choose another --bos: auto, none, or a token of the "
                f"vocabulary."
            )
        return [int(token)]
    vocabulary = tokenizer.get_vocab()
    if bos not in vocabulary:
        raise UnknownNameError.of("token for --bos", bos, [*BOS_CHOICES, *tokenizer.all_special_tokens])
    return [int(vocabulary[bos])]


def prefix_label(tokenizer: Any, prefix: Sequence[int]) -> str:
    """Name the tokens in front of each document in words: ``<s> (id 1)``, or ``none``."""
    pairs = zip(tokenizer.convert_ids_to_tokens(list(prefix)), prefix, strict=True)
    return ", ".join(f"{token} (id {token_id})" for token, token_id in pairs) or "none"


def special_prefix(tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer itself puts in front of a text (a BOS token, or nothing)."""
    return _special_tokens(tokenizer)[0]


def tokens_behind(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that stands behind another.

    Some tokenizers (Llama 2's) put a space in front of whatever they are given, which is right for a beginning only.
    """
    behind, both = (
        list(tokenizer(words, add_special_tokens=False, verbose=False).input_ids) for words in (".", f".{text}")
    )
    alone = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return both[len(behind) :] if both[: len(behind)] == behind else list(alone)


def special_suffix(tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer itself puts behind a text (a separator, or nothing)."""
    return _special_tokens(tokenizer)[1]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    bare, dressed = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (False, True))
    if not bare or bare[0] not in dressed:
        return [], []
    place = dressed.index(bare[0])
    return dressed[:place], dressed[place + len(bare) :]


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the first 12 hexadecimal digits of a hash of a tokenizer's vocabulary."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return digest(vocabulary)
