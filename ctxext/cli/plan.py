"""``ctxext plan``: which length a memory holds, or which memory a length takes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer import Option

from ctxext.cli.options import Checkpoint, Json, Trust
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, UnknownNameError, require_package
from ctxext.progress import terminal

if TYPE_CHECKING:
    from ctxext.planning.plan import Breakdown, Serving, TrainingPlan
    from ctxext.planning.quantised import Stored

ROWS = {
    "weights": "weights",
    "adapters": "trained weights, in float32",
    "gradients": "their gradients",
    "optimizer": "AdamW's moments of them",
    "kept": "kept of all layers for the backward pass",
    "cache": "keys and values of all layers",
    "passing": "those before the windows, until the next token",
    "layer": "one layer at work",
    "loss": "a chunk's logits and loss",
    "total": "peak",
    "host": "kept in the host's memory instead",
}


def plan(
    checkpoint: Checkpoint,
    memory: Annotated[
        str | None,
        Option(
            help="Memory of the device, such as 80GiB: plan the longest context that it holds.",
            show_default="none, with --length",
        ),
    ] = None,
    length: Annotated[
        int | None,
        Option(
            "--length",
            "-l",
            help="Tokens of a sequence: plan the memory that they take.",
            min=1,
            show_default="what --memory holds",
        ),
    ] = None,
    lora_rank: Annotated[int, Option(help="Rank of LoRA on all linear layers.", min=1)] = 16,
    norms: Annotated[bool, Option(help="Train normalisation weights too.")] = True,
    embeddings: Annotated[bool, Option(help="Train the embedding too.")] = True,
    dtype: Annotated[str, Option(help="bf16, fp16, fp32, or auto: fp16 where the config says so, else bf16.")] = (
        "auto"
    ),
    quantisation: Annotated[str | None, Option(help="nf4: 4-bit weights, as in QLoRA.", show_default="none")] = None,
    loss_chunk: Annotated[int, Option(help="Tokens whose logits exist at a time; 0 for all.", min=0)] = 1024,
    checkpointing: Annotated[
        bool, Option(help="Compute layers again in the backward pass, instead of keeping what they made.")
    ] = True,
    save_attention: Annotated[
        bool, Option("--save-attention", help="Keep attention's output for the backward pass all the same.")
    ] = False,
    offload: Annotated[
        bool,
        Option("--offload", help="Move what is kept for the backward pass, the layers' inputs, to the host."),
    ] = False,
    mlp_tile: Annotated[
        int | None, Option(help="Tokens that pass through an MLP at a time.", show_default="all")
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Predict the longest context that fits, for LoRA training and in use, with its breakdown. No weights are loaded.

    One sequence, as recipes/finetune.py trains it and generate() reads it.

    [bold]Example[/]: ctxext plan meta-llama/Llama-3.1-8B --memory 80GiB
    """
    if memory is None and length is None:
        raise InvalidParameterError("Give --memory (80GiB), for the longest context, or --length, for what it takes.")
    require_package("peft", "train", "Training is planned with", CheckpointError)

    from ctxext.adapters import base_of, is_adapter
    from ctxext.checkpoints.source import checked_path, read_any_config
    from ctxext.evaluation.forward import parse_bytes
    from ctxext.planning.plan import plan_serving, plan_training, reach_of
    from ctxext.planning.quantised import stored_as
    from ctxext.training.memory import Memory

    budget = None if memory is None else parse_bytes(memory)
    way = Memory(
        loss_chunk=loss_chunk or None,
        checkpointing=checkpointing,
        save_attention=save_attention,
        offload=offload,
        mlp_tile=mlp_tile,
    )
    if is_adapter(checkpoint):
        base = base_of(checkpoint)
        raise CheckpointError(f"{checkpoint} is an adapter. Plan its base model, {base}; --lora-rank says its size.")
    config = read_any_config(checked_path(checkpoint, {}), trust_remote_code=trust)
    chosen, name = _dtype(config, dtype)
    common: dict[str, Any] = {"dtype": chosen, "quantisation": quantisation, "trust_remote_code": trust}
    trained: dict[str, Any] = {"memory": way, "lora_rank": lora_rank, "norms": norms, "embeddings": embeddings}
    with terminal(stderr=True).status("Planning ..."), warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed, and says so.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        serving = _planned(plan_serving(config, **common), budget, length)
        try:
            training: Breakdown | str = _planned(plan_training(config, **trained, **common), budget, length)
        except (IncompatibleError, InvalidParameterError) as error:
            training = str(error)
    found, reach, stored = {"training": training, "serving": serving}, reach_of(config), stored_as(config)
    if as_json:
        beside = {"reach": reach, "stored_as": stored and stored.method}
        typer.echo(json.dumps(_plain(found, checkpoint, name, budget) | beside, indent=2))
        return
    console = terminal(soft_wrap=True)
    _show(console, found, f"{checkpoint}, {name}{f', {quantisation}' if quantisation else ''}", budget)
    if stored is not None and quantisation is None:
        console.print(_told_of_storage(stored, name), style="yellow")
    _show_reach(console, found, reach, config.model_type)


def _show_reach(console: Console, found: Mapping[str, Breakdown | str], reach: int | None, model_type: str) -> None:
    """Say how far the model itself reaches, which no memory changes."""
    if reach is None:
        console.print(f"The config of this {model_type} does not say how far it reaches.", style="yellow")
        return
    console.print(f"This {model_type} is made for {reach:,} tokens.")
    beyond = [f"{made.length:,}" for made in found.values() if not isinstance(made, str) and made.length > reach]
    if beyond:
        lengths = " and ".join(dict.fromkeys(beyond))
        console.print(
            f"{lengths} tokens exceed its {reach:,}-token window. Extend it first (ctxext patch).", style="yellow"
        )


def _told_of_storage(stored: Stored, dtype: str) -> str:
    """Say how weights that come quantised were counted."""
    if stored.bits is None:
        return (
            f"Its weights are stored as {stored.method}, whose config does not say how many bits they take. They are "
            f"counted in {dtype}, as if unpacked: in use they may take less."
        )
    if stored.experts_only:
        return (
            f"Its experts are stored as {stored.method} and counted so in use, which needs a device that transformers "
            f"has kernels for: elsewhere it unpacks them to {dtype}. Training is counted with them unpacked."
        )
    counted = f"Its linear layers are stored as {stored.method}, {stored.bits:.3g} bits a weight, and counted so"
    return f"{counted}." if stored.trains_packed else f"{counted} in use. Training is counted with them in {dtype}."


def _planned(made: TrainingPlan | Serving, budget: int | None, length: int | None) -> Breakdown:
    from ctxext.planning.plan import longest

    if length is not None:
        return made.at(length)
    assert budget is not None  # one of the two is given
    return longest(made, budget)


def _dtype(config: Any, dtype: str) -> tuple[Any, str]:
    """The dtype that a config and a user mean."""
    from ctxext.evaluation.checkpoint import DTYPES

    if dtype == "auto":
        dtype = "fp16" if getattr(config, "dtype", None) == DTYPES["fp16"] else "bf16"
    if dtype not in DTYPES:
        raise UnknownNameError.of("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype], dtype


def _plain(found: Mapping[str, Breakdown | str], checkpoint: str, dtype: str, budget: int | None) -> dict[str, Any]:
    """The result for programs, in bytes."""
    shown: dict[str, Any] = {"checkpoint": checkpoint, "dtype": dtype, "memory": budget}
    for what, planned in found.items():
        if isinstance(planned, str):
            shown[what] = {"refused": planned}
        else:
            shown[what] = {"length": planned.length, **{part: getattr(planned, part) for part in ROWS}}
            if budget is not None:
                shown[what]["fits"] = planned.total <= budget
    return shown


def _show(console: Console, found: Mapping[str, Breakdown | str], title: str, budget: int | None) -> None:
    """Print the breakdowns side by side."""
    planned = {what: made for what, made in found.items() if not isinstance(made, str)}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("GiB")
    for what in planned:
        table.add_column(what, justify="right")
    table.add_row("tokens", *(f"{p.length:,}" for p in planned.values()), style="bold")
    for part, name in ROWS.items():
        amounts = [getattr(p, part) for p in planned.values()]
        if any(amounts):
            style = "bold" if part == "total" else ""
            table.add_row(name, *(f"{amount / 2**30:.2f}" if amount else "" for amount in amounts), style=style)
    console.print(table, soft_wrap=False)
    for what, made in found.items():
        if isinstance(made, str):
            console.print(f"{what}: {made}", style="yellow")
        elif budget is not None and made.total > budget:
            over = (made.total - budget) / 2**30
            console.print(f"{what}: {made.length:,} tokens take {over:.2f} GiB more than there is.", style="yellow")
    console.print(
        "A layer and the loss are at work in turn: the larger counts. A CUDA context takes up to 1 GiB more.",
        style="dim",
    )
