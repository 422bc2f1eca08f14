"""Fill the marked blocks of README.md and docs/ from the code and the measured results, or check that they are current.

    python scripts/update_readme.py            # rewrite
    python scripts/update_readme.py --check    # exit 1 if a block is not what the code and the results say

A block is between ``<!-- name -->`` and ``<!-- /name -->``. A block named by a CSV file, relative to the page, holds
the file as a table. The error that an example ends in follows it in a block of text, and what a block of the front
pages prints in a block of output, in which ``...`` stands for anything. Every command that installs an extra is the one
of ``ctxext/version.py``.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import doctest
import inspect
import json
import os
import re
import tempfile
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel
from typer.main import get_command

from ctxext.cli.app import app
from ctxext.cli.methods import COLUMNS as METHOD_COLUMNS
from ctxext.cli.methods import method_rows, methods_markdown
from ctxext.methods import BiasMethod, BucketMethod, EncodingMethod, Method, RopeMethod, TableMethod, known_methods
from ctxext.methods.parameters import parameters_of
from ctxext.methods.remap import RemapMethod
from ctxext.runtimes import RUNTIMES
from ctxext.spec import LLAMA
from ctxext.training.settings import Settings
from ctxext.version import INSTALL
from scripts.published_page import published_rows
from scripts.runtimes_page import by_formula_markdown, llama_cpp_markdown, mlx_lm_markdown, vllm_markdown
from tests._examples import SHOWN, printed_by, reason_not_to_run, with_errors

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "evidence"
ENCODINGS = ROOT / "docs" / "concepts"
CONFIGS = ROOT / "recipes" / "configs"
FACTOR = "target_length / trained_length"
BLOCK = r"^<!-- ([\w.-][\w./-]*) -->$"
SAME = doctest.OutputChecker().check_output
INSTALLED = re.compile(r"pip install (?:-e '\.|'ctxext)\[([\w,]+)\]'")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)")


def pages() -> list[Path]:
    """Return the pages in the root and in docs/ that may have blocks."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "changelog.d/README.md", "examples/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def front_pages() -> list[Path]:
    """Return the pages for first steps, each block of which prints its output beneath it."""
    return [ROOT / "README.md", ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs/guides/howto").glob("*.md"))]


@cache
def blocks() -> dict[str, tuple[str, Path]]:
    """Return the text of every block by its name, with the folder that links in it start from."""
    counted = (RESULTS / "coverage.md").read_text().partition("\n\n")[0]
    made = {
        "commands": commands_markdown(),
        "encodings": markdown_of(encoding_rows()),
        "lab_methods": methods_markdown(method_rows(to_train=True)),
        "methods": methods_markdown(method_rows()),
        "parameters": markdown_of(parameter_rows()),
        "published_configs": markdown_of(published_rows()),
        "recipes": markdown_of(recipe_rows()),
        "runs_by_formula": by_formula_markdown(),
        "runs_on_llama_cpp": llama_cpp_markdown(),
        "runs_on_mlx_lm": mlx_lm_markdown(),
        "runs_on_vllm": vllm_markdown(),
        "settings": markdown_of(setting_rows()),
    }
    return {"coverage": (counted, RESULTS)} | {name: (text, ROOT) for name, text in made.items()}


def block(name: str, page: Path) -> tuple[str, Path]:
    """Return the text of one block of a page, with the folder that links in it start from.

    Raises:
        ValueError: if nothing fills a block of this name.
    """
    if name.endswith(".csv"):
        with (page.parent / name).open(encoding="utf-8", newline="") as file:
            return markdown_of(list(csv.reader(file))), (page.parent / name).parent
    if name not in blocks():
        raise ValueError(f"{page.name} has a block {name!r}; known are {', '.join(blocks())}.")
    return blocks()[name]


def markdown_of(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table, the first row as its head."""
    head, *rest = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))


def arguments_of(documented: Any) -> dict[str, str]:
    """What the ``Args:`` of a docstring say, by name, with line breaks joined."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", f"{inspect.getdoc(documented)}\n", re.MULTILINE)
    entries = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.MULTILINE)[1:]
    return {
        name: " ".join(text.split()).replace("``", "`") for name, text in zip(entries[::2], entries[1::2], strict=True)
    }


def described_methods() -> dict[str, dict[str, Any]]:
    """Describe every method by what it says of itself, for the file that ``ctxext methods`` prints."""
    described = {}
    for name, kind in known_methods().items():
        example = kind.example(LLAMA)
        dynamic = "yes" if example.dynamic else "no"
        cells = (name, _group(example), kind.summary, _pick(kind), dynamic, _stock_form(example), kind.source)
        more = {"to train": kind.needs_training, "needs a reach": issubclass(kind, RopeMethod | TableMethod)}
        more |= {"parameters": [field.name for field in dataclasses.fields(kind)]}
        described[name] = dict(zip(METHOD_COLUMNS, cells, strict=True)) | more
    return described


def _group(method: Method) -> str:
    """Return what a method extends, or what an encoding changes."""
    kinds = {"rotary": RopeMethod, "ALiBi": BiasMethod, "tables": TableMethod, "buckets": BucketMethod}
    if isinstance(method, EncodingMethod):
        return method.form
    if isinstance(method, RemapMethod):
        return "remapping"
    return ", ".join(name for name, kind in kinds.items() if isinstance(method, kind)) or "other"


def _pick(kind: type[Method]) -> str:
    """Return the sentence of a method's docstring that says when one would pick it."""
    paragraphs = (inspect.getdoc(kind) or "").split("\n\n")
    reason = next((" ".join(text.split()) for text in paragraphs if text.startswith("Pick it ")), "")
    return reason.removeprefix("Pick it ").split(". ")[0].removesuffix(".").replace("``", "`")


def _stock_form(method: Method) -> str:
    if isinstance(method, BucketMethod):
        return "not for a Llama; on a T5, another largest distance"
    form = method.rope_parameters(LLAMA) if isinstance(method, RopeMethod) else None
    if form is None:
        return "for tables" if isinstance(method, TableMethod) else "none"
    return "default, other base" if form["rope_type"] == "default" else str(form["rope_type"])


def parameter_rows() -> list[list[str]]:
    """Return what each method can be given beside its factor."""
    lines = [["method", "parameter", "default", "what it may be", "meaning"]]
    for name, kind in known_methods().items():
        meanings, parameters = arguments_of(kind), parameters_of(kind)
        for field in dataclasses.fields(kind):
            if field.name != "factor" or not meanings["factor"].startswith(FACTOR):
                default = "-" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
                may_be = str(parameters[field.name])
                lines.append([f"`{name}`", f"`{field.name}`", default, may_be, meanings[field.name]])
    return lines


def told_on() -> dict[str, list[Path]]:
    """The pages of the tour that link to the file of each method of this repository, by the method's name."""
    found = (page for page in sorted(ENCODINGS.glob("*.md")) if page.name != "README.md")  # their index
    pages = {page: page.read_text(encoding="utf-8") for page in found}
    files = {name: f"](../../{_file(kind)})" for name, kind in known_methods().items() if _file(kind)}
    return {name: [page for page, text in pages.items() if link in text] for name, link in files.items()}


def _file(kind: type[Any]) -> str:
    """Where a method of this repository is defined, from the root; empty for one that was registered from elsewhere."""
    path = f"{kind.__module__.replace('.', '/')}.py"
    folders = ("ctxext/methods/", "ctxext/laboratory/encodings/")
    return path if (ROOT / path).is_file() and path.startswith(folders) else ""


def encoding_rows() -> list[list[str]]:
    """Return the pages that tell of each method, beside what it says of itself."""
    told = told_on()
    lines = [["method", "what it does", "explained on", "file"]]
    for name, kind in known_methods().items():
        pages = ", ".join(f"[{page.stem}](docs/concepts/{page.name})" for page in told.get(name, ())) or "-"
        file = f"[{Path(_file(kind)).name}]({_file(kind)})" if _file(kind) else "-"
        lines.append([f"`{name}`", kind.summary, pages, file])
    return lines


def setting_rows() -> list[list[str]]:
    """Return every setting of the recipe."""
    return [["setting", "default", "meaning"], *([f"`{name}`", *rest] for name, *rest in _settings(Settings))]


def _settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    meanings = arguments_of(section)
    inner = {
        name: field.annotation
        for name, field in section.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    for name, field in section.model_fields.items():
        if name not in inner:
            default = "needed" if field.is_required() else f"`{_yaml(field.default)}`"
            yield f"{prefix}{name}", default, meanings[name]
    for name, kind in inner.items():
        yield from _settings(kind, f"{prefix}{name}.")


def _yaml(value: Any) -> str:
    """A value as it stands in a config, on one line."""
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]


def commands_markdown() -> str:
    """Every command of ``ctxext``, with what it does, an example and its options."""
    return "\n\n".join(_command_markdown(name, command) for name, command in _commands(get_command(app), "ctxext"))


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for part, inner in sorted(getattr(command, "commands", {}).items()):
        if hasattr(inner, "commands"):
            yield from _commands(inner, f"{name} {part}")
        else:
            yield f"{name} {part}", inner


def _command_markdown(name: str, command: Any) -> str:
    paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    shown = [part.partition(": ")[2] for part in paragraphs if part.startswith("[bold]Example")]
    lines = [f"### `{name}`", "", paragraphs[0], ""]
    lines += ["```bash", *shown, "```", ""] if shown else []
    return "\n".join([*lines, markdown_of(option_rows(command))])


def option_rows(command: Any) -> list[list[str]]:
    """Return every argument and option of a command, as ``--help`` explains them."""
    lines = [["argument or option", "default", "meaning"]]
    shown = [one for one in command.params if not one.hidden and one.name != "help"]
    for kind in ("argument", "option"):
        for one in (one for one in shown if one.param_type_name == kind):
            flags = [one.metavar or one.name.upper()] if kind == "argument" else [*one.opts, *one.secondary_opts]
            words = ", ".join(f"`{flag}`" for flag in flags)
            lines.append([words, _default(one), f"{one.help or ''}{_choices(command, one.name)}"])
    return lines


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    default = parameter.default
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if isinstance(default, bool):
        return f"`{(parameter.opts if default else parameter.secondary_opts)[0]}`" if parameter.secondary_opts else ""
    return "" if default is None or callable(default) else f"`{default}`"


def _choices(command: Any, name: str) -> str:
    """What a parameter that is one of a few words may be."""
    hint = typing.get_type_hints(command.callback)[name]
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if typing.get_origin(kind) is typing.Literal]
    words = [f"`{word}`" for kind in kinds for word in typing.get_args(kind)]
    return f" One of {', '.join(words)}." if words else ""


def header_of(config: Path) -> dict[str, str]:
    """What the comment in front of a config says about it: hardware, memory, time, expected numbers."""
    found: dict[str, str] = {}
    for line in config.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        entry = re.match(r"# ([A-Z][a-z]+)  +(\S.*)", line)
        if entry:
            found[entry[1]] = entry[2]
        elif found:
            found[list(found)[-1]] += " " + line.lstrip("# ")
    return found


def recipe_rows() -> list[list[str]]:
    """Return all configs, from the comments in front of them."""
    rows = [["config", "hardware", "memory", "time"]]
    for path in sorted(CONFIGS.rglob("*.yaml")):
        header = header_of(path)
        link = f"[{path.stem}]({path.relative_to(ROOT)})"
        rows.append([link, header["Hardware"], _short(header["Memory"]), _short(header["Time"])])
    return rows


def _short(text: str) -> str:
    """Up to and with the first mark of being measured or estimated, without how."""
    number, mark, _ = re.split(r"\((measured|estimated)", text, maxsplit=1)
    return f"{number}({mark})"


def filled(page: Path, text: str) -> str:
    """Return ``text`` of ``page`` with every block in it replaced, links made to start from the page's folder."""
    for name in re.findall(BLOCK, text, re.MULTILINE):
        content, home = block(name, page)
        moved = LINK.sub(lambda link, home=home: f"{link[1]}{_from(page.parent, home, link[2])}", content.rstrip())
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = pattern.sub(lambda match, moved=moved: f"{match[1]}{moved}\n{match[2]}", text)
    return text


def _from(folder: Path, home: Path, target: str) -> str:
    """The link ``target``, relative to ``home``, as it reads in ``folder``."""
    return target if "://" in target else os.path.relpath(home / target, folder)


def with_outputs(pages: dict[Path, str]) -> Iterator[tuple[Path, str]]:
    """Pages whose blocks print beneath them what they print today; all are run in order, in one new folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for page, text in pages.items():
            known: dict[str, object] = {}

            def current(block: re.Match[str], known: dict[str, object] = known) -> str:
                kind, code, shown, recorded = block.groups()
                if recorded or reason_not_to_run(code):
                    return block[0]
                printed = printed_by(code, kind, known)
                if SAME(shown or "\n", printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE):
                    return block[0]
                return f"```{kind}\n{code}```\n\n```output\n{printed}```\n"

            yield page, SHOWN.sub(current, text)


def made() -> Iterator[tuple[Path, str]]:
    """Yield every file that is made or filled in, with its text of today: first the list that pages are filled from."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(told)}" for name, told in described_methods().items())
    listed = f'{{"runtimes": {json.dumps(sorted(RUNTIMES))}, "methods": {{\n{lines}\n}}}}\n'
    yield ROOT / "ctxext" / "methods" / "listed.json", listed
    read = {page: INSTALLED.sub(lambda found: INSTALL.format(found[1]), page.read_text("utf-8")) for page in pages()}
    filled_in = {page: with_errors(filled(page, text)) for page, text in read.items()}
    yield from (filled_in | dict(with_outputs({page: filled_in[page] for page in front_pages()}))).items()


def main(check: Annotated[bool, typer.Option(help="only say whether they are current")] = False) -> None:
    """Fill the blocks of README.md and docs/."""
    for path, text in made():
        current = path.is_file() and path.read_text(encoding="utf-8") == text
        if check and not current:
            raise SystemExit(f"{path.relative_to(ROOT)} is not current: run python scripts/update_readme.py")
        if not current:
            path.write_text(text, encoding="utf-8")
            typer.echo(f"rewritten: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    typer.run(main)
