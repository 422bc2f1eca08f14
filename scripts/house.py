"""Measure the house: print what each room of ctxext weighs, and what one patch walks through.

    python scripts/house.py

The budgets that a change may not exceed stand in ``tests/test_house.py``.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ctxext"
# First words of docstrings that name neither an action nor a thing.
RIDDLES = re.compile(
    r"(What|Which|Whether|How|Of|The same|Who|Whoever|As|It|Its|From|Those|Theirs|Likewise|Nobody|Where)\b"
)
LOOK_UP = re.compile(r"(?<!def )(?<![.\w])(?:base_model|text_of)\(|Subject\.of\(|get_text_config\(")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# What a reader of the core opens: the mechanisms, the contract of methods, and three methods.
CONTRACT = ("spec", *(f"methods.{name}" for name in ("base", "formulas", "parameters", "yarn", "ntk", "pi")))
# What a reader opens for each of five tasks.
TASKS = {
    "add a frequency method": (
        *("docs/guides/extending.md", "ctxext/methods/base.py", "ctxext/methods/pi.py", "ctxext/spec.py"),
        *("ctxext/methods/formulas.py", "ctxext/methods/parameters.py", "tests/methods/test_ntk.py"),
    ),
    "mend a defect of unpatch": (
        *("ctxext/core/edits.py", "ctxext/core/patching.py", "ctxext/core/steps.py", "ctxext/core/override.py"),
        *("tests/core/test_edits.py", "tests/core/test_patching.py"),
    ),
    "add a family": (
        *("ctxext/core/architecture.py", "ctxext/core/edits.py", "ctxext/core/subject.py", "ctxext/core/steps.py"),
        *("ctxext/spec.py", "ctxext/models/mpt.py", "ctxext/models/alibi.py", "ctxext/models/lookups.py"),
        *("ctxext/attention/alibi.py", "tests/_models.py", "tests/contracts/test_architectures.py"),
    ),
    "mend a defect of caches": (  # such as that of commit 4972ff95, padding on the right and two calls
        "docs/concepts/token.md",
        *("ctxext/caches/held.py", "ctxext/attention/engines.py", "ctxext/attention/remap.py"),
        *("ctxext/attention/positions.py", "ctxext/kernels/layout.py", "ctxext/kernels/pieces.py"),
        "tests/caches/test_held.py",
    ),
    "add a column to the perplexity report": (
        *("ctxext/evaluation/perplexity.py", "ctxext/evaluation/perplexity_result.py"),
        *("ctxext/evaluation/report/page.py", "ctxext/measuring/loss_table.py", "tests/evaluation/test_perplexity.py"),
    ),
}
LONG = 25
"""Lines of code from which on a function has a comment."""
# Constructions that make English hard to read, counted in the whole source.
STIFF = (
    *(r"; (?:it|its|that|those|of|where|which|whose|what|who)\b", r"\bthose (?:of|that|in)\b"),
    *(r"\b(?:its|their|whose) own\b", r"\bwhat (?:is|it|stays)\b", r"\bbeside\b", r"\b(?:is|are) no\b"),
    *(r"\bthat of\b", r"\bof which\b", r"\bstands? (?:for|in|at)\b", r"\bin (?:the )?place of\b"),
)
# What Python loads for the first patch.
FIRST_PATCH = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
import ctxext
small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64, "num_hidden_layers": 1}
ctxext.patch(LlamaForCausalLM(LlamaConfig(**small, max_position_embeddings=64)), "yarn", factor=4)
files = [each.__file__ for name, each in sorted(sys.modules.items()) if name.split(".")[0] == "ctxext"]
print("\\n".join(filter(None, files)))
"""


def lines(folder: Path, pattern: str = "*.py") -> int:
    """Count the lines of the files of ``folder`` and below whose names match ``pattern``."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob(pattern))


def tokens(folder: Path) -> int:
    """Count the tokens of code of a folder, without comments and docstrings, which lines alone do not weigh."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    total = 0
    for path in folder.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        documented = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Documented))
        strings = {(node.body[0].lineno, node.body[0].col_offset) for node in documented if ast.get_docstring(node)}
        inside = 0  # an f-string, which is one token before Python 3.12
        for each in tokenize.generate_tokens(io.StringIO(source).readline):
            name = tokenize.tok_name[each.type]
            inside += name == "FSTRING_START"
            total += inside <= (name == "FSTRING_START") and each.type not in layout and each.start not in strings
            inside -= name == "FSTRING_END"
    return total


def loaded() -> list[Path]:
    """Return the files of ctxext that Python has loaded after the first ``patch(llama, "yarn")`` of a process."""
    done = subprocess.run([sys.executable, "-c", FIRST_PATCH], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


def bare_functions(folder: Path) -> list[str]:
    """Return the functions of ``LONG`` and more lines of code without a comment, by file and name."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        comments = {
            each.start[0]
            for each in tokenize.generate_tokens(io.StringIO(source).readline)
            if each.type == tokenize.COMMENT
        }
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                inside = {line for part in body for line in range(part.lineno, (part.end_lineno or 0) + 1)} - comments
                code = sum(bool(row.strip()) for line, row in enumerate(source.splitlines(), 1) if line in inside)
                first = body[0].lineno if body else 0
                if code >= LONG and not comments & set(range(first - 3, (node.end_lineno or 0) + 1)):
                    found.append(f"{path.relative_to(folder)}:{node.name}")
    return found


def stiff(folder: Path) -> int:
    """Count the constructions of ``STIFF``."""
    source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return sum(len(re.findall(pattern, source, re.I)) for pattern in STIFF)


def trees(folder: Path) -> Iterator[ast.Module]:
    """Parse every Python file of ``folder`` and below."""
    for path in sorted(folder.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


@cache
def docstrings(folder: Path) -> list[str]:
    """Return the docstring of every module, class and function that has one."""
    nodes = (node for tree in trees(folder) for node in ast.walk(tree) if isinstance(node, Documented))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def args_without_a_noun(folder: Path) -> list[str]:
    """Return the lines under ``Args:`` that begin with a preposition or a question instead of a noun."""
    sections = (re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", text, re.M) for text in docstrings(folder))
    entry = re.compile(r"^    \**[\w, *]+: ((?:of|what|which|whether|as|how|where)\b.*)", re.M | re.I)
    return [line for section in sections if section for line in entry.findall(section[1])]


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of the package by its dotted name, a package by the name of its folder."""
    paths = {path.relative_to(ROOT).with_suffix("").parts: path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in paths.items()}


@cache
def imported(name: str) -> frozenset[str]:
    """Return what a module imports of this package: at its top, in functions, for types, and through strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules().keys()
            if names - modules().keys():
                found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return frozenset(each for each in found if each.split(".")[0] == "ctxext")


def lines_of(paths: Iterable[Path]) -> int:
    """Count the lines of files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def core() -> set[str]:
    """Return the modules of the core, with the contract of methods and the methods yarn, ntk and pi."""
    return {name for name in modules() if name.startswith("ctxext.core.")} | {f"ctxext.{name}" for name in CONTRACT}


def lines_of_exports(folder: Path) -> int:
    """Count the lines that assignments to ``__all__`` take, without those of packages' ``__init__``."""
    total = 0
    for path in folder.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            named = isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets)
            if named and path.name != "__init__.py":
                total += (node.end_lineno or node.lineno) - node.lineno + 1
    return total


def riddles(folder: Path) -> list[str]:
    """Return the docstrings that begin with a word of ``RIDDLES``."""
    return [text for text in docstrings(folder) if RIDDLES.match(text)]


def without_imperative() -> int:
    """Count the functions whose docstring does not begin with a verb in the imperative, as ruff's D401 sees it."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "D401", "--output-format", "concise"]
    command += ["--config", "lint.pydocstyle.convention='google'", str(PACKAGE)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return sum(" D401 " in line for line in told.stdout.splitlines())


def entered(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """Run ``call`` and return the file and name of every function of ctxext that it enters."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    inside = [code for code in seen if code.co_filename.startswith(str(PACKAGE))]
    return {(code.co_filename, code.co_qualname) for code in inside if not code.co_name.startswith("<")}


def patch_walk() -> set[tuple[str, str]]:
    """Return what ``ctxext.patch(model, "yarn", factor=4)`` of a tiny Llama enters, imports left out."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import ctxext

    def model() -> LlamaForCausalLM:
        small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
        return LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=1, max_position_embeddings=64))

    ctxext.patch(model(), "yarn", factor=4)  # which imports all that it needs
    other = model()
    return entered(lambda: ctxext.patch(other, "yarn", factor=4))


def widest_command() -> int:
    """Return the largest number of parameters that a command takes one by one, beside groups of options."""
    from typer import Typer

    from ctxext.cli.app import app

    def functions(commands: Typer) -> Iterator[Callable[..., Any]]:
        yield from (info.callback for info in commands.registered_commands if info.callback)
        for group in commands.registered_groups:
            if group.typer_instance:
                yield from functions(group.typer_instance)

    taken = [inspect.signature(inspect.unwrap(function), eval_str=True).parameters for function in functions(app)]
    return max(sum(not is_dataclass(each.annotation) for each in parameters.values()) for parameters in taken)


def measure() -> dict[str, int]:
    """Return every figure of the house by its name."""
    walk, first = patch_walk(), loaded()
    return {
        "tokens of code": tokens(PACKAGE),
        "lines that the first patch loads": lines_of(first),
        "files that the first patch loads": len(first),
        "lines of the core": lines_of(modules()[name] for name in core()),
        "files of the core": len(core()),
        "long functions without a comment": len(bare_functions(PACKAGE)),
        "stiff constructions": stiff(PACKAGE),
        "arguments without a noun": len(args_without_a_noun(PACKAGE)),
        "files that one patch enters": len({file for file, _ in walk}),
        "functions that one patch enters": len(walk),
        "docstrings": len(docstrings(PACKAGE)),
        "docstrings that are riddles": len(riddles(PACKAGE)),
        "functions without an imperative": without_imperative(),
        "lines of __all__": lines_of_exports(PACKAGE),
        "lines of JSON in ctxext/": lines(PACKAGE, "*.json"),
        "lines of scripts/": lines(ROOT / "scripts")
        + lines(ROOT / "scripts", "*.sh")
        - lines(ROOT / "scripts" / "studies"),
        "parameters of the widest command": widest_command(),
        "lines of tests/": lines(ROOT / "tests"),
        "look-ups of the base model and its text config": len(
            LOOK_UP.findall("".join(map(ast.unparse, trees(PACKAGE))))
        ),
        **{f"lines to read: {task}": lines_of(ROOT / path for path in paths) for task, paths in TASKS.items()},
        **{f"files to read: {task}": len(paths) for task, paths in TASKS.items()},
    }


def main() -> None:
    """Print the rooms and the figures."""
    rooms = Counter({folder.name: lines(folder) for folder in PACKAGE.iterdir() if folder.is_dir()})
    rooms["top level"] = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.glob("*.py"))
    console = Console(soft_wrap=True)
    for title, rows in (("room", dict(rooms.most_common())), ("figure", measure())):
        table = Table(title, "")
        for name, number in rows.items():
            if number:
                table.add_row(name, f"{number:,}")
        console.print(table)


if __name__ == "__main__":
    main()
