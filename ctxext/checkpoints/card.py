"""Write the model card of an extended checkpoint: a marked section of README.md, and the metadata that the hub reads.

The rest of a card is the user's, or the base model's, and stays.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import RepoCard
from transformers import PreTrainedModel

from ctxext.checkpoints.export import exports_of
from ctxext.core.saved import describe_saved, extensions_in
from ctxext.errors import CheckpointError
from ctxext.methods import known_methods

MODEL_CARD = "README.md"
BEGIN, END = "<!-- ctxext: written anew whenever the checkpoint is saved -->", "<!-- /ctxext -->"
MARKED = re.compile(rf"\n*{re.escape(BEGIN)}.*?{re.escape(END)}\n*", re.DOTALL)


def write_card(
    directory: Path,
    model: PreTrainedModel,
    *,
    name: str,
    base: str = "",
    results: str | None = None,
    adapter: bool = False,
    trusted: bool = False,
    cuts: Sequence[str] = (),
    tags: Sequence[str] = (),
    destination: Path | None = None,
) -> None:
    """Say in the model card of a directory how its model is extended, what was measured, and how to load and serve it.

    Args:
        directory: folder of the card. An existing card keeps all but the marked section, and gains metadata.
        trusted: True if a module next to the weights lets transformers load the model where code is trusted.
        cuts: the limits in files next to the weights that still cut texts, a sentence each.
        tags: Tags of the card before, which PEFT takes out of the card of an adapter.
        destination: folder that the files of ``directory`` will be moved into, for what lies there already.

    Raises:
        CheckpointError: the metadata of the card cannot be read.
    """
    path, saved = directory / MODEL_CARD, model.config.ctxext
    card, description = read_card(path), describe_saved(saved, model.config.model_type)
    is_stock = description.stock and not adapter
    is_pipeline = ((destination or directory) / "modules.json").is_file()
    sections = [
        f"```text\n{description}\n```",
        _loading(model, name, is_stock, trusted, is_pipeline, cuts),
        _serving(model, name, is_stock) if not adapter else "",
        _measured(results) if results else "",
    ]
    section = "\n\n".join(filter(None, [BEGIN, "## Longer context", *sections, END]))
    before, after = (part.strip("\n") for part in (*MARKED.split(card.text, maxsplit=1), "")[:2])
    card.text = "\n\n".join(filter(None, [before or f"# {name}", section, after])) + "\n"
    methods = {side["method"]["method"] for side in extensions_in(saved).values()}
    kept = [tag for tag in tags if not str(tag).startswith("base_model:")]  # PEFT names the present one
    known = [*kept, *(tag for tag in tags_of(card) if tag not in kept)]
    others = [tag for tag in known if tag not in {"ctxext", *known_methods()}]
    card.data["tags"] = [*others, "ctxext", *sorted(methods)]
    if adapter or not (trusted or is_stock):
        card.data["library_name"] = "ctxext"  # the hub shows how to load it with the library that is named
    elif card.data.get("library_name") == "ctxext":
        card.data["library_name"] = "transformers"
    if on_hub := _name_on_hub(base):
        card.data["base_model"] = on_hub
    card.save(path)


def tags_of(card: RepoCard) -> list[str]:
    """Return the tags in the metadata of a card."""
    tags = card.data.get("tags") or []
    return [tags] if isinstance(tags, str) else list(tags)


def read_card(path: Path) -> RepoCard:
    """Read a card with its metadata unchanged: ctxext does not drop a table of results that the hub rejects.

    Raises:
        CheckpointError: the metadata cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return RepoCard(text if text.startswith("---") else f"---\n{{}}\n---\n{text}")
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(
            f"The metadata at the top of {path.name} cannot be read: {error}. Mend them, or remove the file."
        ) from error


def _loading(
    model: PreTrainedModel, name: str, is_stock: bool, trusted: bool, is_pipeline: bool, cuts: Sequence[str]
) -> str:
    kind = type(model)
    lines = ["import ctxext", "", f"model = ctxext.load({json.dumps(name)})"]
    if is_stock and kind.__module__.startswith("transformers."):
        loaded = f"model = {kind.__name__}.from_pretrained({json.dumps(name)})"
        lines = [f"from transformers import {kind.__name__}", "", loaded]
        if is_pipeline:
            loaded = f"model = SentenceTransformer({json.dumps(name)})"
            lines = ["from sentence_transformers import SentenceTransformer", "", loaded]
            if any("max_seq_length" in cut for cut in cuts):
                lines.append(f"model.max_seq_length = {model.config.ctxext['target_length']}")
    lines += [f"# Texts are cut: {cut}" for cut in cuts]
    if trusted:
        lines.append("# or, in a program that takes a path, with ctxext installed: trust_remote_code=True")
    return "\n".join(["Load it:", "", "```python", *lines, "```"])


def _serving(model: PreTrainedModel, name: str, is_stock: bool) -> str:
    if not model.can_generate() or model.config.is_encoder_decoder:
        return ""
    commands = [
        f"{export.command}  # {target if is_stock else export.notes[0]}"
        for target, export in exports_of(model.config, name).items()
        if not isinstance(export, str) and export.exact
    ]
    return "\n".join(["Serve it:", "", "```bash", shlex.join(["ctxext", "serve", name]), *commands, "```"])


def _measured(results: str) -> str:
    """Return a report as a part of the section: under its heading, without pictures, which lie elsewhere."""
    lines = [re.sub(r"^(#+) ", r"##\1 ", line) for line in MARKED.sub("", results).splitlines()]
    text = "\n".join(line for line in lines if not line.startswith("!["))
    return "Measured:\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip()


def _name_on_hub(place: str) -> str | None:
    """Return the name on the hub of what was loaded from ``place``; None for anything local but the hub's own cache."""
    for part in Path(place).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return place if re.fullmatch(r"[\w.-]+/[\w.-]+", place) and not Path(place).exists() else None
