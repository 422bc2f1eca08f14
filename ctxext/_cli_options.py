"""The options that commands share, and what they mean to the library."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from ctxext.errors import CheckpointError, CtxextError, InvalidParameterError, UnknownNameError

if TYPE_CHECKING:
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


class Window(StrEnum):
    """What to do about a window in every attention layer."""

    keep = "keep"
    lift = "lift"


class Scaling(StrEnum):
    """What to do about a scaling of positions that a config carries already."""

    extended = "extend"
    replaced = "replace"  # str has a method of the shorter name


def method_names(incomplete: str) -> list[str]:
    """For shells: every method is a file of its name, so that none needs to be imported."""
    files = Path(__file__).with_name("methods").glob("[!_]*.py")
    return sorted(file.stem for file in files if file.stem != "base" and file.stem.startswith(incomplete))


Checkpoint = Annotated[str, typer.Argument(help="A checkpoint directory, or a name on the hub.", metavar="CHECKPOINT")]
MethodName = Annotated[
    str,
    typer.Option("--method", "-m", help="A method; `ctxext methods` lists them.", autocompletion=method_names),
]
Factor = Annotated[float | None, typer.Option("--factor", "-f", help="Target length / trained length, at least 1.")]
Target = Annotated[int | None, typer.Option("--target-length", help="Tokens to extend to, instead of a factor.")]
Trained = Annotated[
    int | None,
    typer.Option("--trained-length", help="Tokens the weights were trained for, where the config does not say so."),
]
ScalingOption = Annotated[
    Scaling | None,
    typer.Option(
        "--scaling",
        help="For a checkpoint whose config scales its positions already: extend from it, or replace it.",
    ),
]
SlidingWindow = Annotated[
    Window | None, typer.Option("--sliding-window", help="For models whose every attention layer has one.")
]
Param = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", help="The method's own parameter, KEY=JSON or KEY=@FILE.json. Repeatable."),
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
    from ctxext._inspect import rope_of_checkpoint
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
    sliding_window: Window | None,
    param: list[str] | None,
    scaling: Scaling | None = None,
) -> dict[str, Any]:
    """What ``ctxext.patch`` takes beside the method.

    Raises:
        InvalidParameterError: for a ``--param`` that is not KEY=VALUE, or that has an option of its own.
    """
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


def parameter_of(text: str) -> tuple[str, Any]:
    """``key=value``, the value as JSON, or the text itself where it is not JSON."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise InvalidParameterError(f"--param must be KEY=VALUE, such as beta_fast=64; found {text!r}.")
    if value.startswith("@"):
        path = Path(value[1:])
        if not path.is_file():
            raise InvalidParameterError(f"--param {key}: there is no file {path}.")
        value = path.read_text(encoding="utf-8")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
