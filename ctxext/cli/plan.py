"""``ctxext plan``: which length a memory holds, or which memory a length takes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from ctxext.cli.options import (
    Checkpoint,
    Dtype,
    ExtensionOptions,
    Json,
    Trust,
    grouped,
    option,
    option_group,
    print_json,
    token_option,
)
from ctxext.errors import CheckpointError, IncompatibleError, InvalidParameterError, require_package
from ctxext.progress import terminal
from ctxext.quantities import parse_bytes

if TYPE_CHECKING:
    from ctxext.planning.plan import Breakdown, Plan
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
    "prompts": "two such prompts, which ctxext serve keeps",
    "host": "kept in the host's memory instead",
    "draft": "draft heads (MTP), on servers only",
    "draft_cache": "their keys and values",
}


@option_group
class PlanOptions:
    """Memory to fill or length to reach, and how the weights are stored."""

    memory: str | None = option(
        "Memory of the device, such as 80GiB: plan the longest context that it holds.",
        show_default="none, with --length",
    )
    length: int | None = token_option(
        "Tokens of a sequence: plan the memory that they take.",
        "--length",
        "-l",
        show_default="what --memory holds",
    )
    dtype: Dtype = option("auto is fp16 where the config says so, else bf16.", default="auto")
    quantisation: Literal["nf4"] | None = option("nf4: 4-bit weights, as in QLoRA.", show_default="none")
    cache_bits: Literal["8", "4"] | None = option(
        "Bits of a number in a quantised cache, in use; scales are counted too.", show_default="those of the dtype"
    )
    prompt_chunk: int | None = token_option(
        "Tokens of a prompt read at a time, in use: prefill_chunk_size of generate(), -ub of llama.cpp.",
        "--prompt-chunk",
        least=1,
        show_default="all",
    )


@option_group
class TrainedOptions:
    """Weights that are trained; see ``plan_training``."""

    lora_rank: int = option("Rank of LoRA on all linear layers.", default=16, min=1)
    norms: bool = option("Train normalisation weights too.", default=True)
    embeddings: bool = option("Train the embedding too.", default=True)


@option_group
class MemoryOptions:
    """Storage of activations; see ``Memory``."""

    loss_chunk: int = option("Tokens whose logits exist at a time; 0 for all.", default=1024, min=0)
    checkpointing: bool = option(
        "Recompute layers in the backward pass, instead of keeping their activations.", default=True
    )
    save_attention: bool = option(
        "Keep attention's output for the backward pass even so.", "--save-attention", default=False
    )
    offload: bool = option(
        "Move the layers' inputs, which are kept for the backward pass, to the host.", "--offload", default=False
    )
    mlp_tile: int | None = option("Tokens that pass through an MLP at a time.", show_default="all")


@grouped
def plan(
    checkpoint: Checkpoint,
    *,
    asked: PlanOptions,
    extension: ExtensionOptions,
    trained: TrainedOptions,
    memory: MemoryOptions,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Predict the longest context that fits, for LoRA training and in use, with its breakdown. No weights are loaded.

    One sequence, as recipes/finetune.py trains it and generate() reads it. With --method, as extended by that method.

    [bold]Example[/]: ctxext plan meta-llama/Llama-3.1-8B --memory 80GiB
    """
    if asked.memory is None and asked.length is None:
        raise InvalidParameterError("Give --memory (80GiB), for the longest context, or --length, for what it takes.")
    extension.require_method()

    from ctxext.checkpoints.adapters import base_of, is_adapter
    from ctxext.checkpoints.load import extended_config
    from ctxext.checkpoints.source import checked_path, config_place, quantised_beside, read_any_config
    from ctxext.measuring.checkpoint import DTYPES, stored_dtype
    from ctxext.planning.plan import longest, plan_serving, plan_training, reach_of
    from ctxext.planning.quantised import stored_as
    from ctxext.training.memory import Memory

    def taken(plan: Plan) -> Breakdown:
        return longest(plan, size or 0) if asked.length is None else plan.at(asked.length)

    size = None if asked.memory is None else parse_bytes(asked.memory)
    way = Memory(**asdict(memory) | {"loss_chunk": memory.loss_chunk or None})
    if is_adapter(checkpoint):
        base = base_of(checkpoint)
        raise CheckpointError(f"{checkpoint} is an adapter. Plan its base model, {base}; --lora-rank says its size.")
    place, file = config_place(checkpoint)
    config = read_any_config(checked_path(place, file), trust_remote_code=trust, **file)
    if (packed := quantised_beside(checkpoint, config)) is not None:
        config.quantization_config = packed
    dtype: str = asked.dtype
    if dtype == "auto":
        dtype = "fp16" if stored_dtype(config) == DTYPES["fp16"] else "bf16"
    common: dict[str, Any] = {"dtype": DTYPES[dtype], "quantisation": asked.quantisation, "trust_remote_code": trust}
    with terminal(stderr=True).status("Planning ..."), warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed, and says so.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        if extension.method is not None:
            config = extended_config(config, **extension.arguments(), trust_remote_code=trust)
        bits = int(asked.cache_bits) if asked.cache_bits else None
        serving = taken(plan_serving(config, cache_bits=bits, prompt_chunk=asked.prompt_chunk, **common))
        try:
            require_package("peft", "train", "Training is planned with")
            training: Breakdown | str = taken(plan_training(config, memory=way, **asdict(trained), **common))
        except (IncompatibleError, InvalidParameterError) as error:
            training = str(error)
    plans, reach, stored = {"training": training, "serving": serving}, reach_of(config), stored_as(config)
    if as_json:
        about = {"checkpoint": checkpoint, "dtype": dtype, "memory": size}
        beside = {"reach": reach, "stored_as": stored and stored.method}
        print_json(about | {name: _as_json(made, size) for name, made in plans.items()} | beside)
        return
    console = terminal(soft_wrap=True)
    parts = [checkpoint, extension.method, dtype, asked.quantisation]
    title = ", ".join([part for part in parts if part] + [f"{asked.cache_bits}-bit cache"] * bool(asked.cache_bits))
    _show(console, plans, title, size)
    if stored is not None and asked.quantisation is None:
        console.print(_storage_sentence(stored, dtype), style="yellow")
    _show_reach(console, plans, reach, config.model_type)


def _show_reach(console: Console, plans: Mapping[str, Breakdown | str], reach: int | None, model_type: str) -> None:
    """Say how far the model itself reaches, which no memory changes."""
    if reach is None:
        console.print(f"The config of this {model_type} does not say how far it reaches.", style="yellow")
        return
    console.print(f"This {model_type} is made for {reach:,} tokens.")
    beyond = [f"{made.length:,}" for made in plans.values() if not isinstance(made, str) and made.length > reach]
    if beyond:
        lengths = " and ".join(dict.fromkeys(beyond))
        console.print(
            f"{lengths} tokens exceed its {reach:,}-token window. Extend it first (ctxext patch).", style="yellow"
        )


def _storage_sentence(stored: Stored, dtype: str) -> str:
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


def _as_json(plan: Breakdown | str, size: int | None) -> dict[str, Any]:
    """Return one plan for programs, in bytes."""
    if isinstance(plan, str):
        return {"refused": plan}
    fits = {} if size is None else {"fits": plan.total <= size}
    return {"length": plan.length, **{part: getattr(plan, part) for part in ROWS}, **fits}


def _show(console: Console, plans: Mapping[str, Breakdown | str], title: str, size: int | None) -> None:
    """Print the breakdowns side by side."""
    from ctxext.evaluation.report.page import TextTable

    made = {name: plan for name, plan in plans.items() if not isinstance(plan, str)}
    rows = [["tokens", *(f"{plan.length:,}" for plan in made.values())]]
    for part, name in ROWS.items():
        amounts = [getattr(plan, part) for plan in made.values()]
        if any(amounts):
            rows.append([name, *(f"{amount / 2**30:.2f}" if amount else "" for amount in amounts)])
    table = TextTable(header=["GiB", *made], rows=rows, styles={"tokens": "best", ROWS["total"]: "best"})
    console.print(f"{title}\n")
    console.print(table.for_terminal(), soft_wrap=False)
    for name, plan in plans.items():
        if isinstance(plan, str):
            console.print(f"{name}: {plan}", style="yellow")
        elif size is not None and plan.total > size:
            over = (plan.total - size) / 2**30
            console.print(f"{name}: {plan.length:,} tokens take {over:.2f} GiB more than there is.", style="yellow")
    console.print(
        "\nA layer and the loss are at work in turn: the larger counts. A CUDA context takes up to 1 GiB more. On a "
        "CPU, training with memory.return_freed: null may take several times as much.",
        style="dim",
    )
