"""The options that commands share, and what they mean to the library."""

from __future__ import annotations

import contextlib
import json
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
    Console(stderr=True, highlight=False).print(f"Error: {message}", style="red", markup=False, soft_wrap=True)


class Clean(TyperGroup):
    """A group of commands that end in a message where ctxext refuses something, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _clean():
            return super().invoke(ctx)


class CleanCommand(TyperCommand):
    """The same for a script with one command."""

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
