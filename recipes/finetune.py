"""Make a longer window real: extend a checkpoint and fine-tune it briefly, on one CPU or many GPUs.

    python recipes/finetune.py --config recipes/configs/smollm2-135m-16k-yarn-pose.yaml --data.train books.parquet
    accelerate launch recipes/finetune.py --config ... --factor 8 --training.learning_rate 2e-5
    python recipes/finetune.py --config ... --data.train books.parquet --resume

Read it from top to bottom, copy it, change it. Every setting is explained in ``ctxext/training/settings.py``; any of
them can be given on the command line, by its dotted name or, where that is unambiguous, by the last part of it.

In the output directory: ``checkpoint-*`` to resume from, ``adapter`` (``ctxext.load`` restores it with its extension),
``merged`` with ``merge`` (stock transformers loads it; where a table of positions was trained there is ``model`` alone,
which it loads too), ``run.json`` with all that was set and found, and ``loss.png``.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from ctxext.errors import CtxextError
from ctxext.training.settings import Settings, read_settings, refuse_mistakes


def asked() -> tuple[Settings, bool]:
    """Read the command line: the settings, and whether to resume. Mistakes end the program here."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--config", required=True, action="append", help="YAML file; see recipes/configs")
    parser.add_argument("--resume", action="store_true", help="go on from the last whole checkpoint in the output")
    known, overrides = parser.parse_known_args()
    if len(known.config) > 1:
        parser.error("--config is given more than once, and takes one file")
    try:
        settings = read_settings(known.config[0], overrides)
        refuse_mistakes(settings)
    except CtxextError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    return settings, known.resume


if __name__ == "__main__":
    ASKED = asked()

from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed

import ctxext
from ctxext.checkpoints.save import require_padding
from ctxext.files import read_json, write_json
from ctxext.measuring.provenance import command, git_state, machine, now, versions
from ctxext.methods import method_class
from ctxext.progress import saying_what_is_left_out
from ctxext.texts.trained import RUN, SETTINGS, record_of
from ctxext.training import ExtensionCallback, Memory, return_freed_memory
from ctxext.training.before_after import BeforeAndAfter, gain, summary
from ctxext.training.checkpoint import (
    in_fast_dtype,
    load_base,
    require_device,
    try_step,
    with_all_weights,
    with_found,
)
from ctxext.training.checkpoints import CompleteCheckpoints, alone_in, last_checkpoint, resume_point, saving
from ctxext.training.curriculum import Curriculum, sequences_of, stages_of, try_stages
from ctxext.training.documents import TokenisedDocuments
from ctxext.training.figure import save_training_figure
from ctxext.training.heads import SHARE, RetrievalShare
from ctxext.training.lora import attach_lora, merged, trained_weights
from ctxext.training.masked import MaskedSequences, shift_of
from ctxext.training.memory import peak_memory
from ctxext.training.parallel import launched_parallelism
from ctxext.training.progress import TrainingProgress
from ctxext.training.retrieval import RetrievalSequences
from ctxext.training.sequences import require_gaps, require_separate
from ctxext.training.table import TrainedTable
from ctxext.training.trainer import LongTrainer


def main(settings: Settings, resume: bool) -> None:
    """Train and save, or end in one sentence."""
    # PEFT asks a config beside the weights whether the vocabulary grew; a GGUF file has none. Nothing makes it grow.
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf")
    try:
        with saying_what_is_left_out(say), alone_in(settings.output, resume=resume):
            finetune(settings, resume=resume)
    except CtxextError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        kept = last_checkpoint(Path(settings.output))
        again = "Nothing is kept: no checkpoint was whole yet."
        if kept is not None:
            again = f"{kept.name} is kept in {kept.parent}; run the same command with --resume to go on."
        say(f"Interrupted. {again}")
        sys.exit(130)


def finetune(settings: Settings, *, resume: bool = False) -> None:
    """The whole recipe."""
    output, started = Path(settings.output), now()
    device = require_device(settings)
    settings = in_fast_dtype(settings, device)
    arguments = training_arguments(settings, device)
    if arguments.n_gpu > 1:  # the Trainer would copy the model to all of them, and read as many sequences a step
        say(f"This run takes one of the {arguments.n_gpu} GPUs; accelerate launch takes all of them.")
        arguments._n_gpu = 1
    checkpoint = resume_point(settings, resume=resume)
    if settings.memory.return_freed is not None and arguments.device.type == "cpu":
        return_freed_memory(above=settings.memory.return_freed * 2**20)
    set_seed(settings.seed)

    # 1. The texts and the method, which are checked before weights are read; the model, extended, and its adapter.
    data, training, extension = settings.data, settings.training, settings.extension
    outline = load_base(settings, arguments.device, weights=False)
    chunk = {} if data.masked is None else {"loss_chunk": None}
    memory = Memory(**settings.memory.model_dump(exclude={"return_freed"}) | chunk)
    try_step(outline.model, settings, memory)
    tokenizer = outline.tokenizer
    documents = TokenisedDocuments.read(data.train, tokenizer, split=data.split, column=data.column, tokens=data.tokens)
    documents.require_known(outline.model)
    cut = sequences_of(settings, documents)
    if data.retrieval:
        RetrievalSequences(cut, tokenizer, share=1.0, kinds=data.retrieval_kinds, seed=settings.seed).require_room()
    BeforeAndAfter(outline, settings)
    if not method_class(extension.method).reads_weights(extension.parameters):
        try_stages(outline.model, settings)
    loaded = load_base(settings, arguments.device, tokenizer=tokenizer)
    model = loaded.model
    measured = BeforeAndAfter(loaded, settings)
    ctxext.patch(model, extension.method, **extension.arguments())
    found = with_found(settings, model)  # heads that were scored: the weights in training would give others
    if found is not settings:
        try_stages(outline.model, found)
    description = ctxext.describe(model)
    if settings.data.positions == "packed":
        require_separate(model)
    elif settings.data.positions == "pose" and data.masked is None:
        require_gaps(model)
    table = None if settings.table is None else TrainedTable(model, only_new=settings.table == "new_rows")
    if settings.merge or table is not None:
        require_padding(model, tokenizer)  # it is saved beside the model, after hours perhaps
    if table is None:
        model = attach_lora(model, **settings.lora.model_dump())
    trained = trained_weights(model) if table is None else str(table)
    held = memory.apply(model)

    # 2. The data, cut into as many sequences as there will be steps to read them.
    readers = arguments.world_size // launched_parallelism().non_data_parallel_size  # some may share a sequence
    per_step = training.batch * training.accumulation * readers
    sequences = sequences_of(settings, documents, per_step, description.trained_length)
    if data.retrieval:
        kinds = data.retrieval_kinds
        sequences = RetrievalSequences(sequences, tokenizer, share=data.retrieval, kinds=kinds, seed=settings.seed)
    if data.masked is not None:
        shift = shift_of(model) if data.positions == "pose" else None
        sequences = MaskedSequences(sequences, tokenizer, share=data.masked, seed=settings.seed, shift=shift)

    # 3. Training.
    heads = RetrievalShare(model, settings)
    progress = TrainingProgress(lambda step: per_step * sequences.length_of(step * per_step))
    trainer = LongTrainer(
        model,
        arguments,
        train_dataset=sequences,
        embedding_learning_rate=training.embedding_learning_rate,
        callbacks=[
            Curriculum(model, stages_of(found), memory, held),
            ExtensionCallback(model),
            CompleteCheckpoints(sequences, training.keep),
            heads,
            progress,
        ],
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    if trainer.is_world_process_zero():
        say(f"{description}\n\n{sequences}\n{trained}\n")
    with saving(output):
        before = measured.before(model, output / "before.json", resumes=checkpoint is not None)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            progress.close()

    # 4. What is left of it.
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    with saving(output):
        if table is None:
            trainer.save_model(str(output / "adapter"))  # in all processes: each may hold a part of the weights only
        elif trainer.is_world_process_zero():
            table.require_kept()
            ctxext.save(model, output / "model", tokenizer=tokenizer)
    after, failed = measured.after(model)
    if not trainer.is_world_process_zero():
        return
    report = {
        "command": command(),
        "started": started,
        "finished": now(),
        "settings": settings.model_dump(),
        "checkpoint": {"name": loaded.name, "sha256": loaded.sha256, "dtype": loaded.dtype_note},
        "extension": model.config.ctxext,
        "data": str(sequences),
        "texts": read_json(output / SETTINGS).get("texts")  # as they were at the beginning
        or record_of(data.train, data.split, settings.checkpoint),  # where an earlier version began
        "trained": trained,
        **{name: [entry for entry in trainer.state.log_history if name in entry] for name in ("loss", SHARE)},
        "evaluation": {"before": before, "after": after},
        "training_seconds": progress.total_seconds,
        "tokens_per_second": progress.tokens_per_second,
        "peak_memory_bytes": peak_memory(arguments.device),
        "processes": arguments.world_size,
        "machine": machine(arguments.device.type),
        "versions": versions(),
        "git": git_state(),
    }
    with saving(output):
        if table is None:
            tokenizer.save_pretrained(output / "adapter")
        write_json(output / RUN, report)
        title = f"{loaded.name}, {settings.extension.method} to {description.target_length:,} tokens"
        gains = {"before": gain(before), "after": gain(after)}
        save_training_figure(output / "loss.png", report["loss"], title=title, gains=gains, shares=report[SHARE])
        if settings.merge and table is None:
            whole = with_all_weights(model, found, output / "adapter")
            lines = (f"* {when} training: {summary(found)}" for when, found in report["evaluation"].items() if found)
            ctxext.save(merged(whole), output / "merged", tokenizer=tokenizer, results="\n".join(lines))
    for when, found in report["evaluation"].items():
        if found:
            say(f"{when} training: {summary(found)}")
    kept = "model" if table else f"adapter{' and merged' if settings.merge else ''}"
    say(f"Saved in {output}: {kept}, run.json, loss.png")
    if failed is not None:
        raise failed


def training_arguments(settings: Settings, device: str) -> TrainingArguments:
    """Return the arguments of the Trainer."""
    training = settings.training
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # of `accelerate launch`: what is computed in, `dtype` says
    return TrainingArguments(
        output_dir=settings.output,
        max_steps=training.steps,
        per_device_train_batch_size=training.batch,
        gradient_accumulation_steps=training.accumulation,
        learning_rate=training.learning_rate,
        lr_scheduler_type={"cosine": "cosine", "constant": "constant_with_warmup"}[training.schedule],
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip,
        bf16=settings.dtype == "bf16",
        use_cpu=device == "cpu",
        seed=settings.seed,
        save_strategy="steps",
        save_steps=training.checkpoint_every,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,  # the default hides losses that are no numbers
        train_sampling_strategy="sequential",  # the sequences are shuffled already, the same way at every resumption
        remove_unused_columns=False,
        dataloader_pin_memory=device == "cuda",
        disable_tqdm=True,
        report_to=[],
    )


def say(text: str) -> None:
    """Print a text for the user."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*ASKED)
