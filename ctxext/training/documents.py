"""Documents as token ids on disk: tokenised once, mapped into memory, shared by all processes of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ctxext.errors import CheckpointError, CtxextError, InvalidParameterError
from ctxext.files import JsonObject, digest
from ctxext.measuring.forward import check_known
from ctxext.texts.corpus import special_prefix, tokenise
from ctxext.texts.documents import files_of, is_saved, read_documents


class TokenisedDocuments:
    """Tokens of each document: of a text without a prefix, of a conversation with all that its template puts there.

    Args:
        rows: a ``datasets.Dataset`` (or anything with ``rows[i]["input_ids"]``) in Arrow format.
        prefix: token ids in front of every text that the model reads (a BOS token, or nothing).
        answered: Tokens of each conversation that an assistant is to write, None for a text; by default all texts.
    """

    def __init__(
        self,
        rows: Any,
        names: Sequence[str],
        lengths: Sequence[int],
        prefix: Sequence[int],
        answered: Sequence[int | None] = (),
    ) -> None:
        self.rows, self.names, self.lengths, self.prefix = rows, list(names), list(lengths), list(prefix)
        self.answered = list(answered) or [None] * len(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int, stop: int) -> Int[Tensor, " tokens"]:
        """Read a stretch of one document."""
        # Arrow's own slice reads only these tokens from the disk.
        column = self.rows.data.column("input_ids")
        stretch = column[document].values.slice(start, stop - start)
        return torch.from_numpy(stretch.to_numpy().copy()).long()

    def answers(self, conversation: int) -> Bool[Tensor, " tokens"]:
        """Read which tokens of a conversation an assistant is to write."""
        marks = self.rows.data.column("answers")[conversation].values
        return torch.from_numpy(marks.to_numpy(zero_copy_only=False).copy())

    def require_known(self, model: nn.Module) -> None:
        """Raise ``InvalidParameterError`` for a token that the model lacks: training would end there, late."""
        import pyarrow.compute

        largest = pyarrow.compute.max(pyarrow.compute.list_flatten(self.rows.data.column("input_ids"))).as_py()
        check_known(model, torch.tensor([largest or 0]), predicted=True)

    @classmethod
    def read(
        cls,
        sources: Sequence[str],
        tokenizer: Any,
        *,
        split: str | None = None,
        column: str | None = None,
        tokens: int | None = None,
    ) -> TokenisedDocuments:
        """Read and tokenise documents, or find them in the cache of ``datasets`` from the last time.

        In a run of several processes the first of each machine does the work, and the others read its result.

        Args:
            tokens: stop after the document with which this many tokens are reached; None reads all.

        Raises:
            InvalidParameterError: no documents, or a source that cannot be read.
            CheckpointError: the cache of ``datasets`` cannot be written.
        """
        import pyarrow.compute
        from accelerate import PartialState
        from datasets import Dataset, Features, Value, config
        from datasets import List as Listed
        from datasets.exceptions import DatasetGenerationError

        if "-" in sources:
            raise InvalidParameterError("Training reads its documents more than once; give a file, not standard input.")
        asked = {"sources": list(sources), "split": split, "column": column, "tokens": tokens}
        with PartialState().local_main_process_first():
            try:
                rows = Dataset.from_generator(
                    _rows,
                    features=Features(
                        {
                            "name": Value("string"),
                            "input_ids": Listed(Value("int32")),
                            "answers": Listed(Value("bool")),
                            "answered": Value("int32"),
                        }
                    ),
                    gen_kwargs={"tokenizer": tokenizer, "asked": asked},
                    fingerprint=_fingerprint(asked, tokenizer),
                )
            except DatasetGenerationError as error:
                # datasets wraps every error of the generator and of the disk; only the cause says what to do.
                if isinstance(error.__cause__, CtxextError):
                    raise error.__cause__ from None
                if isinstance(error.__cause__, OSError):
                    raise CheckpointError(
                        f"Cannot keep the tokenised documents in {config.HF_DATASETS_CACHE}: {error.__cause__}. Make "
                        f"room there, or set HF_DATASETS_CACHE to another place."
                    ) from error
                raise
        lengths = pyarrow.compute.list_value_length(rows.data.column("input_ids")).to_pylist()
        return cls(rows, rows["name"], lengths, special_prefix(tokenizer), rows["answered"])


def _rows(tokenizer: Any, asked: JsonObject) -> Iterator[dict[str, Any]]:
    """Yield one row per document."""
    total = 0
    for document in read_documents(asked["sources"], split=asked["split"], column=asked["column"]):
        tokenised = tokenise(document, tokenizer, prefix=None if document.messages else [])
        ids, marks = tokenised.input_ids[0], tokenised.answers
        yield {
            "name": document.name,
            "input_ids": ids.numpy(),
            "answers": None if marks is None else marks[0].numpy(),
            "answered": None if marks is None else tokenised.answered,
        }
        total += len(ids)
        if asked["tokens"] is not None and total >= asked["tokens"]:
            return
    if total == 0:
        raise InvalidParameterError(f"No document with any text in it was found in {', '.join(asked['sources'])}.")


def _fingerprint(asked: JsonObject, tokenizer: Any) -> str:
    """Compute a hash of the files, the options of reading, the tokenizer, and the columns that are kept."""
    files = [
        [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
        for source in asked["sources"]
        for file in _files(Path(source), asked["column"], asked["split"])
    ]
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    said = [type(tokenizer).__name__, tokenizer.chat_template, str(tokenizer.special_tokens_map)]  # templates use them
    return digest(json.dumps([asked, files, vocabulary, *said, "normalised"]), 16)


def _files(path: Path, column: str | None, split: str | None) -> list[Path]:
    if not path.is_dir():
        return [path] if path.exists() else []
    if is_saved(path):
        return sorted(path.rglob("*"))
    return files_of(path, column, split).files
