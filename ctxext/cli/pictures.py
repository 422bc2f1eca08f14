"""The commands that draw: one method alone, and several methods next to each other."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ctxext.cli.options import (
    Json,
    StrictCommand,
    Trained,
    Trust,
    check_output,
    grouped,
    option,
    option_group,
    token_option,
)
from ctxext.errors import CheckpointError, InvalidParameterError
from ctxext.files import whole_file
from ctxext.registry import method_names
from ctxext.texts.documents import read_text
from ctxext.texts.folders import is_text

if TYPE_CHECKING:
    from ctxext.laboratory.pictures.picture import Picture
    from ctxext.spec import RopeSpec

plot_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


@option_group
class PictureOptions:
    """The extension of a method, and the file that its picture goes to."""

    output: Path | None = option(
        "The PNG file to write.",
        "--output",
        "-o",
        show_default="named after the command, with a number where that exists; of show with --json none",
    )
    factor: float = option("Target length / trained length.", "--factor", "-f", default=4.0)
    trained_length: Trained = None
    trust: Trust = False

    def file(self, name: str) -> Path:
        """Return the file to write to, by default one that does not exist: an earlier picture must stay."""
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        path = self.output or next(path for stem in names if not os.path.lexists(path := Path(f"{stem}.png")))
        check_output(path, (".png",))
        return path


@option_group
class RotationOptions:
    """Rotation to draw, from a checkpoint or from numbers."""

    checkpoint: Annotated[
        str | None,
        Argument(
            help="A directory or a name on the hub.",
            show_default="none: --rotary-dim, --base and --trained-length describe it",
        ),
    ] = None
    rotary_dim: int | None = option("Rotary dimensions of a head.", show_default="the checkpoint's")
    base: float | None = option("Base of the frequencies, a config's rope_theta.", show_default="the checkpoint's")

    def rope(self, trained_length: int | None, trust: bool) -> RopeSpec:
        """Return the rotation.

        Raises:
            InvalidParameterError: it is described twice, or in part.
        """
        from ctxext.checkpoints.inspect import rope_of_checkpoint
        from ctxext.spec import RopeSpec

        if self.checkpoint is not None:
            if self.rotary_dim is not None or self.base is not None:
                raise InvalidParameterError("A checkpoint says its own --rotary-dim and --base; leave them out.")
            return rope_of_checkpoint(self.checkpoint, trained_length=trained_length, trust_remote_code=trust)
        if self.rotary_dim is None or self.base is None or trained_length is None:
            raise InvalidParameterError(
                "Give a checkpoint, or all of --rotary-dim, --base and --trained-length (Llama 2: 128, 10000, 4096)."
            )
        return RopeSpec(rotary_dim=self.rotary_dim, base=self.base, trained_length=trained_length)


@option_group
class ShownOptions:
    """Checkpoint and text that a method is shown on."""

    model: str | None = option(
        "A checkpoint to show it on: a directory or a name on the hub.", show_default="an example"
    )
    sentence: str | None = option(  # not ``text``: that name holds sources, which must exist (StrictCommand.invoke)
        "A sentence or a UTF-8 file, for encodings that depend on the text; "
        "for others, with --model, attention by distance in the text before and after.",
        "--text",
        "-t",
        show_default="none; a sentence where one is needed",
    )
    layer: int = option("Attention layer, counted from 0, where layers differ.", default=0)
    length: int | None = token_option("Tokens of --text to read.", show_default="all, at most 1,024")


@plot_app.callback()
def plot() -> None:
    """Draw the frequencies or positions of methods.

    [bold]Example[/]: ctxext plot frequencies Llama-3-8B --factor 4 -o spectrum.png
    """


@plot_app.command(cls=StrictCommand)
@grouped
def frequencies(
    *,
    rotation: RotationOptions,
    method: Annotated[
        list[str] | None,
        Option(
            "--method",
            "-m",
            help="A method to draw. Repeatable. Default: all that need only a factor.",
            autocompletion=method_names,
        ),
    ] = None,
    picture: PictureOptions,
) -> None:
    """Draw the spectrum of each method: which frequencies it keeps, ramps, interpolates.

    [bold]Example[/]: ctxext plot frequencies Llama-3-8B --factor 4 -m yarn -m ntk -o spectrum.png
    """
    output = picture.file("frequencies")
    from ctxext.laboratory.pictures.frequencies import shown_by_default, spectrum_picture
    from ctxext.measuring.readings import named_method

    rope, factor = rotation.rope(picture.trained_length, picture.trust), picture.factor
    chosen = [named_method(text, factor) for text in method] if method else shown_by_default(factor, rope)
    name = Path(rotation.checkpoint).name if rotation.checkpoint else ""
    _write_picture(output, spectrum_picture(chosen, rope, name))


@option_group
class PositionsOptions(PictureOptions):
    """The extension of methods that remap positions, and the file that the picture goes to."""

    factor: float = option("Target length / trained length.", "--factor", "-f", default=2.0)
    trained_length: int | None = token_option(
        "Tokens that the model was trained for. Up to 18 of them, at twice the length, show their numbers.",
        show_default="the checkpoint's, or 16",
    )


@plot_app.command(cls=StrictCommand)
@grouped
def positions(
    *,
    checkpoint: Annotated[
        str | None,
        Argument(help="A directory or a name on the hub.", show_default="none: --trained-length says all that counts"),
    ] = None,
    method: Annotated[
        list[str] | None,
        Option(
            "--method",
            "-m",
            help='A method to draw, with parameters where needed: -m "self_extend window=0.75". Repeatable.',
            show_default="self_extend, rerope, dual_chunk and streaming",
            autocompletion=method_names,
        ),
    ] = None,
    picture: PositionsOptions,
) -> None:
    """Draw the relative position of each key and query under methods that remap positions.

    [bold]Example[/]: ctxext plot positions -m self_extend -m "rerope window=8" -f 2 -o positions.png
    """
    output = picture.file("positions")
    from ctxext.laboratory.pictures.positions import TOKENS, positions_picture
    from ctxext.laboratory.pictures.request import PictureRequest
    from ctxext.measuring.readings import named_method

    request = PictureRequest(checkpoint=checkpoint, trained_length=picture.trained_length, trust=picture.trust)
    asked = method or ("self_extend", "rerope", "dual_chunk", "streaming")
    chosen = [named_method(text, picture.factor) for text in asked]
    _write_picture(output, positions_picture(chosen, request.rope(TOKENS)))


@grouped
def show(
    *,
    method: Annotated[
        str,
        Argument(
            help='A method, with parameters where needed: "self_extend window=8". Or rope, the unchanged RoPE.',
            metavar="METHOD",
            autocompletion=method_names,
        ),
    ],
    shown: ShownOptions,
    picture: PictureOptions,
    as_json: Json = False,
) -> None:
    """Draw a method: the encoding itself, without training, in one picture.

    Vectors that are added, scores and turns of a rotation, biases of heads, relative positions, or what a text makes of
    an encoding that depends on it: the method's own form says which.

    [bold]Example[/]: ctxext show yarn --model Llama-3-8B -o yarn.png
    """
    output = None if as_json and picture.output is None else picture.file("show")
    text = None if shown.sentence is None else _text_of(shown.sentence)
    from transformers.utils.logging import disable_progress_bar

    from ctxext.laboratory.pictures.of_method import picture_of
    from ctxext.laboratory.pictures.request import PictureRequest
    from ctxext.measuring.readings import named_method

    request = PictureRequest(
        checkpoint=shown.model,
        text=text,
        layer=shown.layer,
        length=shown.length,
        trained_length=picture.trained_length,
        trust=picture.trust,
    )
    disable_progress_bar()  # of weights that are loaded in a moment
    drawn = picture_of(None if method == "rope" else named_method(method, picture.factor), request)
    if as_json:
        typer.echo(json.dumps(drawn.numbers))
    if output is not None:
        _write_picture(output, drawn, quiet=as_json)
    if not as_json:
        typer.echo(f"{drawn.sentence}. {drawn.caption}")


def _text_of(given: str) -> str:
    """Return a sentence as it is, or what a file of this name holds."""
    path = Path(given)
    if os.path.isfile(given):  # its name may hold spaces
        return read_text(path)
    if is_text(path) or (path.suffix and len(given) < 256 and len(given.split()) == 1):
        raise InvalidParameterError(f"--text {given}: there is no such file. Give a file, or a sentence in quotes.")
    return given


def _write_picture(output: Path, picture: Picture, *, quiet: bool = False) -> None:
    """Write a file that takes the place of ``output`` when it is whole, and say so where there was one before."""
    earlier = os.path.lexists(output)
    try:
        with whole_file(output) as half:
            picture.save(half)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error.strerror or error}.") from error
    if earlier or not quiet:
        typer.echo(f"Wrote {output}{', in place of an earlier file' if earlier else ''}", err=quiet)
