"""Find out which of vLLM's model classes read the rope parameters of a config as they are.

For each causal language model type of the installed transformers: the class that vLLM's registry names for its
architecture, and every expression that the class's module (or the module that it takes its attention from) hands to
``get_rope``, with file and line. Modules are parsed, never imported. What comes out is ``ctxext/runtimes/vllm.json``,
which ``export`` reads: a class that does anything but pass the config on is exact only where ``runtimes/vllm.py`` has
looked at what it does.

    VLLM_TARGET_DEVICE=empty pip download --no-deps --no-binary vllm vllm==0.33.0    # and unpack it
    python -m scripts.vllm_table vllm-0.33.0
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ctxext.runtimes.vllm import TABLE
from scripts.proof import write_table
from tests.walk.tiny import model_types

# What passes the config on, layer type by layer type where it has them.
AS_THEY_ARE = {
    "config.rope_parameters",
    "self.config.rope_parameters",
    "config.rope_parameters[layer_type]",
    "config.rope_parameters.get(layer_type)",
    "dict(config.rope_parameters[layer_type])",
    "getattr(config, 'rope_parameters', None)",
    "getattr(config, 'rope_parameters', {})",
    "rope_parameters",
    "rope_params",
    "None",
}


def registry(tree: Path) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class), of text and multimodal generation models."""
    source = ast.parse((tree / "vllm/model_executor/models/registry.py").read_text())
    found: dict[str, tuple[str, str]] = {}
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            name = ast.unparse(node.targets[0])
            if name in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"):
                found |= ast.literal_eval(node.value)
    return found


def _files(tree: Path, module: str) -> list[Path]:
    """The files of a module of the registry; some are packages."""
    if module.startswith("vllm."):
        package = tree / module.replace(".", "/")
        return sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
    return [tree / "vllm/model_executor/models" / f"{module}.py"]


def _expressions(path: Path, tree: Path) -> dict[str, str]:
    """Everything in a file that becomes ``rope_parameters``, or changes them, with its place."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call):
            # An object of vision towers and the like is built from literals; only what a config feeds counts.
            values = [keyword.value for keyword in node.keywords if keyword.arg == "rope_parameters"]
        elif isinstance(node, ast.Assign):
            target = ast.unparse(node.targets[0])
            if "rope_parameters" in target or target == "rope_params":
                values = [node.value] if "[" not in target else [node]  # type: ignore[list-item]
        for value in values:
            found[ast.unparse(value)] = f"{path.relative_to(tree / 'vllm')}:{node.lineno}"
    return found


def _calls_rope(path: Path) -> bool:
    return "get_rope(" in path.read_text()


def _imported(path: Path, tree: Path) -> list[Path]:
    """The model files that a file imports classes from."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not any(name.name[:1].isupper() for name in node.names):
            continue
        module = node.module or ""
        if node.level == 1:
            found.append(path.parent / f"{module}.py")
        elif module.startswith("vllm.model_executor.models.") or module.startswith("vllm.models."):
            found += _files(tree, module)
    return [file for file in found if file.is_file() and _calls_rope(file)]


def line(tree: Path, module: str, name: str) -> dict[str, Any]:
    """What is known of one class."""
    files = _files(tree, module)
    where = next((f for f in files if f"class {name}(" in f.read_text()), files[0])
    number = next(
        (n for n, text in enumerate(where.read_text().splitlines(), 1) if text.startswith(f"class {name}(")), 1
    )
    callers = [file for file in files if _calls_rope(file)]
    if not callers:
        callers = [found for file in files for found in _imported(file, tree)]
    expressions: dict[str, str] = {}
    for file in dict.fromkeys(callers):
        expressions |= {text: at for text, at in _expressions(file, tree).items() if text not in AS_THEY_ARE}
    interleaved = any(_interleaves(file) for file in dict.fromkeys([*files, *callers]))
    place = f"{where.relative_to(tree / 'vllm')}:{number} {name}"
    return {"class": place, "otherwise": expressions, "interleaved": interleaved}


def _interleaves(path: Path) -> bool:
    """Whether a file asks for GPT-J's layout of pairs, which vLLM's longrope refuses."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    afterwards = [ast.unparse(node) for node in nodes if isinstance(node, ast.Assign)]
    return any(text.endswith("is_neox_style = False") for text in afterwards) or any(
        keyword.arg == "is_neox_style" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for call in calls
        if ast.unparse(call.func) == "get_rope"
        for keyword in call.keywords
    )


def main(tree: Annotated[Path, typer.Argument(help="vLLM's source distribution, unpacked.")]) -> None:
    """Write the table anew."""
    known, lines = registry(tree), {}
    for model_type in model_types("causal"):
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        architecture = architecture[0] if isinstance(architecture, tuple | list) else architecture
        lines[model_type] = line(tree, *known[architecture]) if architecture in known else {"class": None}
    versions = {"vllm": tree.resolve().name.removeprefix("vllm-"), "transformers": transformers.__version__}
    write_table(TABLE, versions, lines)


if __name__ == "__main__":
    typer.run(main)
