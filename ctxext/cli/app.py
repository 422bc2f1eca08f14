"""The command line. Heavy imports live inside the commands, so that help and mistakes answer quickly."""

from __future__ import annotations

import functools
import gc
import io
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn
from typer import Argument, Option

from ctxext.cli.ask import ask
from ctxext.cli.check import check
from ctxext.cli.choose import choose
from ctxext.cli.eval import eval_app
from ctxext.cli.heads import heads
from ctxext.cli.lab import lab_app
from ctxext.cli.options import (
    Checkpoint,
    CopyOptions,
    DemoOptions,
    ExtensionOptions,
    Json,
    Markdown,
    StrictCommand,
    Trained,
    Trust,
    grouped,
    print_json,
)
from ctxext.cli.pictures import plot_app, show
from ctxext.cli.plan import plan
from ctxext.cli.serve import serve
from ctxext.files import gguf_at
from ctxext.mistakes import refuse_gguf
from ctxext.progress import DelayedBar, status, terminal
from ctxext.registry import runtime_names
from ctxext.texts.documents import read_text

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(plot_app, name="plot")
app.add_typer(eval_app, name="eval")
app.add_typer(lab_app, name="lab")


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False) -> None:
    """Give a Hugging Face checkpoint a longer context, and prove that it works.

    `ctxext inspect` lists the methods that extend a checkpoint, `ctxext eval compare` measures them.

    [bold]Example[/]: ctxext patch Llama-3-8B Llama-3-8B-32k --method yarn --factor 4
    """
    from ctxext.version import __version__

    if version:
        typer.echo(__version__)
        raise typer.Exit()
    # Characters that an encoding lacks (×, ±, a name), and bytes outside it, become question marks.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # DeepSpeed reports a missing GPU on standard output, whatever imports it.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)
    # transformers warns of every rope type that it does not know, and trying methods tries those. Where it is not
    # imported yet, the help of a command must not wait for it.
    if "transformers" in sys.modules:
        from transformers.utils.logging import set_verbosity_error

        set_verbosity_error()
    else:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@app.command(cls=StrictCommand)
def inspect(
    checkpoint: Checkpoint,
    text: Annotated[
        list[str] | None,
        Option(
            "--text",
            "-t",
            help="Also estimate the gain of a longer window on this file. Repeatable.",
            show_default="none",
        ),
    ] = None,
    trained_length: Trained = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Show which positions a checkpoint has and which methods extend it. No weights are loaded.

    Reads a directory, an adapter directory, a GGUF file or a name on the hub. A longer window pays where a text returns
    to passages from long before: --text counts how much of the text does.

    [bold]Example[/]: ctxext inspect meta-llama/Llama-3.1-8B --text mine.txt
    """
    if "torch" not in sys.modules:  # whose import makes a million objects, to be searched for garbage at each 700
        gc.set_threshold(50_000)
    with status(terminal(stderr=True), f"Trying methods on {Path(checkpoint).name} ..."):  # torch alone takes seconds
        from ctxext.checkpoints.adapters import is_adapter
        from ctxext.checkpoints.inspect import inspect_adapter, inspect_checkpoint
        from ctxext.checkpoints.source import adapter_on_hub, config_place, read_tokenizer
        from ctxext.cli.show import repeats_in, show_inspection, show_repeats
        from ctxext.texts.repeats import likeness_of

        place = Path(adapter_on_hub(checkpoint, {})[0])
        if is_adapter(place):
            if text or trained_length:
                flags = "--text or --trained-length"
                raise typer.BadParameter("name the base checkpoint, whose window it is", param_hint=flags)
            description = inspect_adapter(place)
            print_json(description) if as_json else typer.echo(str(description))
            return
        folder, location = config_place(checkpoint)
        where: dict[str, Any] = {"trust_remote_code": trust, **location}
        inspection = inspect_checkpoint(folder, trained_length=trained_length, **where)
        tokenizer = read_tokenizer(folder, **where) if text else None
        repeats = repeats_in(text, tokenizer, trained_length or inspection.trained_length) if text else []
    if as_json:
        told = [one._asdict() | {"verdict": one.verdict, "gain": likeness_of(one.share).gain} for one in repeats]
        print_json(asdict(inspection) | ({"texts": told} if text else {}))
        return
    said = (["--trained-length", str(trained_length)] if trained_length else []) + ["--trust-remote-code"] * trust
    files = [word for one in text or () for word in ("--text", one)]
    show_repeats(repeats, checkpoint, [*files, *said], terminal())
    show_inspection(inspection, checkpoint, said, terminal())


@app.command(cls=StrictCommand)
@grouped
def patch(
    *,
    source: Annotated[
        Path,
        Argument(help="A directory with safetensors weights, a .gguf file, a name on the hub, or demo.", metavar="SRC"),
    ],
    destination: Annotated[Path, Argument(help="The directory to write, which must not exist yet.", metavar="DST")],
    extension: ExtensionOptions,
    copy: CopyOptions,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write an extended copy of a checkpoint: a new config, and the same weights.

    The weights are never loaded, except from a GGUF file, where they are dequantised to bfloat16. Without --method, a
    GGUF file becomes a plain checkpoint. DST appears whole at the end, or not at all.

    [bold]Example[/]: ctxext patch Llama-3-8B Llama-3-8B-32k --method yarn --factor 4
    """
    extension.require_method()
    if extension.method is None and gguf_at(source) is None:
        raise typer.BadParameter("see `ctxext methods`; only a .gguf file is copied plain", param_hint="--method")

    from ctxext.checkpoints.write import patch_checkpoint, patch_with_draft
    from ctxext.cli.show import show_written

    write = patch_checkpoint if copy.draft is None else functools.partial(patch_with_draft, draft=copy.draft)
    with DelayedBar("copying weights", BarColumn(), DownloadColumn(), after=0.5) as progress:
        written = write(
            source,
            destination,
            link=copy.link,
            trust_remote_code=trust,
            progress=progress,
            results=None if copy.results is None else read_text(copy.results),
            **extension.arguments(),
        )
    print_json(written) if as_json else show_written(written)


@app.command(cls=StrictCommand)
@grouped
def export(
    *,
    checkpoint: Checkpoint,
    to: Annotated[
        str,
        Option(
            "--to",
            help="The runtime that serves it: llama.cpp, mlx-lm, sglang or vllm.",
            autocompletion=runtime_names,
        ),
    ],
    gguf: Annotated[
        tuple[Path, Path] | None,
        Option(
            "--gguf",
            metavar="IN OUT",
            help="For llama.cpp: a GGUF file of this model, and the copy with the extension to write.",
            show_default="none",
        ),
    ] = None,
    extension: ExtensionOptions,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Print the flags with which another runtime serves an extended checkpoint, and the limits of that runtime.

    With --method, a plain checkpoint is served extended while its files stay as they are. With --gguf, llama.cpp serves
    what flags cannot say: any frequencies that do not change with the text.

    [bold]Example[/]: ctxext export Llama-3-8B-32k --to vllm
    """
    extension.require_method()
    if gguf is None or extension.method is None:
        refuse_gguf(checkpoint)

    from ctxext.checkpoints.export import export as make
    from ctxext.cli.show import show_export

    with DelayedBar("copying weights", BarColumn(), DownloadColumn(), after=0.5) as progress:
        made = make(checkpoint, to=to, gguf=gguf, trust_remote_code=trust, progress=progress, **extension.arguments())
    print_json(made) if as_json else show_export(made, terminal())


for _command in (plan, choose, heads, show, ask, serve, check):
    app.command(cls=StrictCommand)(_command)


@app.command(cls=StrictCommand)
def methods(as_json: Json = False, markdown: Markdown = False) -> None:
    """List every method that extends a checkpoint: its effect, when to pick it, and its name in stock transformers.

    `ctxext lab methods` lists the encodings that a model has to be trained with.

    [bold]Example[/]: ctxext methods
    """
    from ctxext.cli.methods import show_methods

    show_methods(to_train=False, as_json=as_json, markdown=markdown)


@app.command(cls=StrictCommand)
@grouped
def demo(*, options: DemoOptions) -> None:
    """Measure on a real checkpoint what a longer context is worth, and answer a question with it.

    Reads the same text on every machine: two minutes on two CPU cores, less with matrix units.

    [bold]Example[/]: ctxext demo
    """
    from ctxext.cli.demo import show as run

    run(options)
