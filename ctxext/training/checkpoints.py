"""Checkpoints of a run: find the last whole one, and check that a run resumes with the settings it began with."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ctxext.checkpoints.adapters import ENCODING_FILE, EXTENSION_FILE, encoding_digest, keep_extension
from ctxext.checkpoints.carried import differences
from ctxext.core.edits import Edits
from ctxext.core.saved import checked_extension
from ctxext.core.subject import Subject
from ctxext.errors import CheckpointError, InvalidParameterError, PatchStateError
from ctxext.files import JsonObject, digest, read_json, write_json
from ctxext.texts.trained import RUN, SETTINGS, record_of
from ctxext.training.sequences import Sequences
from ctxext.training.settings import Settings, checked_settings

COMPLETE = "complete"
"""Name of the file that is written into a checkpoint last."""
UNWRITTEN = (OSError, SafetensorError)
WRITER = re.compile("PytorchStreamWriter|inline_container")  # in errors of torch.save, which have no class
WITHOUT_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of some file systems of networks
# Settings that may change between the two parts of a run without changing its losses.
FREE = (
    "output=",
    "merge=",
    "training.checkpoint_every=",
    "training.keep=",
    "training.log_every=",
    "evaluation.",
    "memory.return_freed=",
)


class CompleteCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Marks a checkpoint once all its files are written, by a hash of the last sequence and the files' sizes.

    Checkpoints without the mark are never taken. Then only the newest ``keep`` of the run stay, and what a kill left of
    others goes. The Trainer would also count and delete copies that a user made, and would delete before the new
    checkpoint is whole.

    A resumed run saves and logs as the new settings say, and no mean of losses spans the step where it was resumed.
    A run with other texts, or on more or fewer processes, is refused: it would read sequences twice or never.
    """

    def __init__(self, sequences: Sequences, keep: int) -> None:
        self.sequences, self.keep = sequences, keep

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the intervals from the current settings, not from the checkpoint."""
        state.compute_steps(args, state.max_steps)
        mark, last = self._mark(args, state)
        if mark.is_file() and mark.read_text("utf-8").partition("\n")[0] not in (last, ""):
            raise InvalidParameterError(
                f"The run in {args.output_dir} read other sequences up to step {state.global_step}. Resume with the "
                f"same texts, on as many processes, or start a new run in another --output."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what a checkpoint does not hold, the losses since the last entry."""
        control.should_log |= control.should_save

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint that was just written, and delete old ones."""
        if state.is_world_process_zero:
            mark, last = self._mark(args, state)
            files = (path for path in mark.parent.rglob("[!.]*") if path.is_file() and path.suffix != ".md")
            sizes = {path.relative_to(mark.parent).as_posix(): path.stat().st_size for path in files if path != mark}
            mark.write_text("\n".join([last, *(f"{size} {name}" for name, size in sizes.items())]), "utf-8")
            kept = sorted(whole_checkpoints(args.output_dir))[-self.keep :]
            for step, old in _numbered(args.output_dir).items():
                if step not in kept:
                    shutil.rmtree(old, ignore_errors=True)

    def _mark(self, args: Any, state: Any) -> tuple[Path, str]:
        number = len(self.sequences) * state.global_step // state.max_steps - 1
        last = "" if number < 0 else digest(f"{number} {self.sequences[number]['input_ids'].tolist()}")
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE, last


def last_checkpoint(output: str | Path) -> Path | None:
    """Return the newest checkpoint in a run's directory that was written whole, None if there is none.

    A run that was killed, or whose disk was full, while it saved leaves a part of a checkpoint behind, which the
    Trainer itself would take for the newest.
    """
    complete = whole_checkpoints(output)
    return complete[max(complete)] if complete else None


def whole_checkpoints(output: str | Path) -> dict[int, Path]:
    """Return the checkpoints of a run that were written whole, by their steps."""
    return {step: path for step, path in _numbered(output).items() if (path / COMPLETE).is_file()}


def _numbered(output: str | Path) -> dict[int, Path]:
    """Return all checkpoints in a run's directory, by their steps; a copy such as checkpoint-20-backup has none."""
    found = {path.name.removeprefix("checkpoint-"): path for path in Path(output).glob("checkpoint-*")}
    return {int(step): path for step, path in found.items() if step.isdecimal() and path.is_dir()}


def resume_point(settings: Settings, *, resume: bool) -> Path | None:
    """Return the checkpoint to resume from, None for a new run, which writes its settings into its directory.

    Raises:
        PatchStateError: if the directory holds a run already, or its results, and ``resume`` is false.
        CheckpointError: if there is nothing to resume from, or a file of it is missing, or not whole.
        InvalidParameterError: if the run to resume had other settings; the message names each of them.
    """
    output = Path(settings.output)
    checkpoint, stored = last_checkpoint(output), output / SETTINGS
    if not resume:
        if checkpoint is not None:
            raise PatchStateError(
                f"{output} holds a run with {checkpoint.name}. Add --resume to go on from there, or choose another "
                f"--output."
            )
        if (output / RUN).is_file():
            raise PatchStateError(
                f"{output} holds the results of a run ({RUN}), which a new run would replace. Choose another --output."
            )
        with saving(output):
            output.mkdir(parents=True, exist_ok=True)
            texts = record_of(settings.data.train, settings.data.split, settings.checkpoint)
            write_json(stored, settings.model_dump() | {"texts": texts})
        return None
    if checkpoint is None:
        raise CheckpointError(f"{output} holds no whole checkpoint to resume from; start a new run without --resume.")
    _require_whole(checkpoint, stored)
    kept = {name: value for name, value in read_json(stored).items() if name != "texts"}
    earlier = checked_settings(kept, str(stored))
    before, now = _flat(earlier.model_dump()), _flat(settings.model_dump())
    changes = [f"{key}={before.get(key)!r}, now {now.get(key)!r}" for key in now if before.get(key) != now.get(key)]
    changes = [change for change in changes if not change.startswith(FREE)]  # those leave the losses as they are
    if changes:
        raise InvalidParameterError(
            f"The run in {output} had other settings: {'; '.join(changes)}. Resume with the same settings, or start a "
            f"new run in another --output."
        )
    return checkpoint


def _require_whole(checkpoint: Path, stored: Path) -> None:
    """Look at the files that a checkpoint was marked with, and at the settings that are stored with its run.

    Raises:
        CheckpointError: one of them is missing, or of another size.
    """
    entries = [line.partition(" ") for line in (checkpoint / COMPLETE).read_text("utf-8").splitlines()[1:]]
    sizes: dict[Path, int | None] = {stored: None}
    for size, _, name in entries:
        # JSON files may be rewritten. Other processes may still write their files.
        is_fixed = not (name.endswith(".json") or name.startswith("rng_state_") or "/" in name)
        sizes[checkpoint / name] = int(size) if is_fixed else None
    for path, kept_size in sizes.items():
        # The Trainer goes on without the states of its optimiser and its learning rate, or ends where it reads half.
        if not path.is_file() or kept_size not in (None, path.stat().st_size):
            raise CheckpointError(
                f"{path} is missing, or not whole any more: the run would not go on as it began. Put it back, or start "
                f"a new run in another --output."
            )


@contextlib.contextmanager
def alone_in(output: str | Path, *, resume: bool) -> Iterator[None]:
    """Keep other programs from training into the same directory inside the block; a new run creates it.

    Raises:
        PatchStateError: if one does already.
    """
    is_ours = os.environ.get("RANK", "0") == "0"  # of several processes of a run, one has the directory for all
    folder = Path(output)
    with contextlib.ExitStack() as held:
        if is_ours and not resume and not folder.exists():
            with saving(output):
                folder.mkdir(parents=True, exist_ok=True)
            held.callback(_remove_empty, folder)
        if is_ours and os.name == "posix" and folder.is_dir():
            import fcntl  # here, as Windows has none

            held.callback(os.close, place := os.open(output, os.O_RDONLY))
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PatchStateError(
                    f"Another program trains into {output} at this moment, and the two would write the same files. "
                    f"Choose another --output, or wait for its end."
                ) from error
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
        yield


def _remove_empty(directory: Path) -> None:
    """Remove a directory that was created for a run which wrote nothing."""
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


@contextlib.contextmanager
def saving(output: str | Path) -> Iterator[None]:
    """Turn errors of writing inside the block into a CheckpointError that names the last whole checkpoint.

    Raises:
        CheckpointError: if a file could not be written.
    """
    try:
        yield
    except (*UNWRITTEN, CheckpointError, RuntimeError) as error:
        of_torch = isinstance(error, RuntimeError) and WRITER.search(str(error)) is not None
        cause = error.__cause__ if isinstance(error, CheckpointError) else error
        if not of_torch and not isinstance(cause, UNWRITTEN):
            raise
        last = last_checkpoint(output)
        rest = "Nothing was trained yet; make room, or choose another --output, and start again."
        if last is not None:
            rest = f"The last whole checkpoint is {last}; make room and go on from it with --resume."
        why = "torch could not write a file, as on a full disk" if of_torch else str(error).rstrip(".")
        raise CheckpointError(f"Saving failed: {why}. {rest}") from error


def _flat(settings: JsonObject, prefix: str = "") -> JsonObject:
    """Map dotted names to values."""
    flat: JsonObject = {}
    for key, value in settings.items():
        nested = isinstance(value, dict) and key != "parameters"
        flat |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


class ExtensionCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Writes the extension into every checkpoint, and refuses to resume into a differently extended model.

    The Trainer restores only weights: resumed into an unpatched model, it silently continues with other positions, even
    if the adapter in the checkpoint carries its extension. Only this callback compares the two. From the start of
    training on, every saved adapter (checkpoints, ``trainer.save_model``) gets the extension. A PEFT model whose base
    was patched does so without the callback too, unless it only puts virtual tokens before the text (prompt and prefix
    tuning). What the Trainer uploads before the end (``hub_strategy="every_save"``) has the extension only by this
    callback.

    Args:
        model: the model being trained, patched or not, or a PEFT wrapper around it.

    Raises:
        PatchStateError: at the start of training, if the checkpoint was written under another extension, or with other
            weights in an encoding that its adapter does not hold.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.extension: JsonObject | None = None
        self.encoding: str | None = None
        self._subject: Subject | None = None
        if model is not None:
            self._take(model)

    def _take(self, model: nn.Module) -> Subject:
        self._subject = subject = Subject.of(model)
        self.extension = subject.saved
        return subject

    def state(self) -> JsonObject:
        """Return the state that the Trainer stores in ``trainer_state.json``."""
        if self._subject is not None:  # the model may have been extended further since
            self.extension = self._subject.saved
            self.encoding = encoding_digest(self._subject)
        return {"args": {}, "attributes": {"extension": self.extension, "encoding": self.encoding}}

    def on_push_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Copy the extension of the newest checkpoint to the folder that the Trainer uploads with the adapter of it."""
        place = Path(args.output_dir)
        for name in (ENCODING_FILE, EXTENSION_FILE) if state.is_world_process_zero else ():
            if (path := place / f"checkpoint-{state.global_step}" / name).is_file():
                shutil.copyfile(path, place / name)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Compare the checkpoint that is being resumed with the model."""
        subject = None if model is None else self._take(model)
        if subject is not None:
            keep_extension(subject, Edits())  # for good: a model is saved after training, too
        if state.global_step == 0:
            return
        stored = state.stateful_callbacks.get(type(self).__name__)
        if stored is None:
            raise PatchStateError(
                "The checkpoint to resume from was written without ExtensionCallback, so nothing says how its model "
                "was extended. Resume without this callback if you are sure that it is the same."
            )
        before = stored["attributes"]["extension"]
        if before is not None:
            before = checked_extension(before, "the checkpoint's trainer_state.json")
        different = differences(before, self.extension)
        if different:
            raise PatchStateError(
                f"The model of the checkpoint was {_name(before)}, this model is {_name(self.extension)}: {different}. "
                f"Extend it the same way before resuming, or start a new run."
            )
        trained = stored["attributes"].get("encoding")
        if trained is not None and subject is not None and trained != encoding_digest(subject):
            raise PatchStateError(
                "The model of the checkpoint had other weights in its encoding, which the Trainer does not restore "
                "with an adapter. Train the model of ctxext.load(CHECKPOINT, is_trainable=True) instead."
            )


def _name(extension: JsonObject | None) -> str:
    if extension is None:
        return "not extended"
    method = extension["method"]
    return f"extended by {method['method']} (factor {method['factor']:g}, fingerprint {extension['fingerprint']})"
