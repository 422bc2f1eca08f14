"""Measure a model before and after training: whether it uses its window, and the cost inside the trained window."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ctxext.caches.digest import UNKNOWN, weights_digest
from ctxext.checkpoints.load import reads_weights
from ctxext.core import patching
from ctxext.errors import CheckpointError, CtxextError, IncompatibleError, InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.perplexity import PerplexityPlan, inside_survey, make_plan, prepare
from ctxext.evaluation.perplexity_result import POSITIONS, PerplexityReading, PerplexityResult
from ctxext.evaluation.trials import trials_of
from ctxext.files import JsonObject, read_json, write_json
from ctxext.measuring.checkpoint import DTYPES, Checkpoint
from ctxext.measuring.survey import Survey
from ctxext.progress import StageBar, terminal
from ctxext.texts.corpus import corpus_of
from ctxext.texts.documents import read_documents
from ctxext.training.figure import Gain
from ctxext.training.settings import Settings


class BeforeAndAfter:
    """Measurements of a model in training, set by ``settings.evaluation``; without weights they are only checked.

    Raises:
        IncompatibleError: if a measurement is set under DeepSpeed ZeRO-3.
        CtxextError: if a measurement is impossible: texts too short, a length beyond the window, ...
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.plan: PerplexityPlan | None = None
        evaluation = settings.evaluation
        if (evaluation.text or evaluation.passkey_lengths) and is_deepspeed_zero3_enabled():
            raise IncompatibleError(
                "Nothing can be measured inside a run under DeepSpeed ZeRO-3: before the first step no process has "
                "whole weights. Leave out the section evaluation, and measure the merged checkpoint with ctxext eval."
            )
        extension = settings.extension
        if not checkpoint.has_weights and reads_weights(extension.method, extension.parameters):
            return  # no head of an outline can be scored: all is checked again with the weights
        if evaluation.passkey_lengths and not checkpoint.has_weights:
            with patching.patched(checkpoint.model, extension.method, **extension.arguments()):
                self._keys(checkpoint)
        # Packed weights hold means, which devices may round otherwise.
        is_known = checkpoint.has_weights and settings.quantisation is None
        self.weights = weights_digest(checkpoint.model, alone=True) if is_known else UNKNOWN
        if evaluation.text:
            self.plan = self._plan()
            self.corpus = corpus_of(
                read_documents(evaluation.text, split=evaluation.split, column=evaluation.column),
                checkpoint.tokenizer,
                tokens=self.plan.length + 1,
                shorter=True,
                skip=evaluation.skip,
                limit=evaluation.documents,
            )
            if not checkpoint.has_weights:
                return
            survey = inside_survey(checkpoint, self.corpus, self.plan)
            self._finish(survey)
            losses = survey.losses()
            self.inside = [losses[job.key] for job in survey.jobs]

    def before(self, model: nn.Module, path: Path, *, resumes: bool = False) -> JsonObject:
        """Measure, or read the same measurement from ``path``, kept there before the run was interrupted.

        Raises:
            CheckpointError: the run that is resumed began with other weights.
        """
        asked = self.settings.evaluation.model_dump() | {"format": PerplexityResult.FORMAT, "judged": passkey.JUDGED}
        # A run that was killed before its first checkpoint leaves its directory to a new run, perhaps a different one.
        asked["of"] = self.settings.model_dump(include={"dtype", "quantisation", "seed", "extension"})
        asked["of"] |= {"checkpoint": self.checkpoint.sha256, "weights": self.weights}
        if self.plan is not None:
            asked["of"]["corpus"] = self.corpus.sha256
        stored = read_json(path) if path.is_file() else {}
        began = stored.get("evaluation", {}).get("of", {}).get("weights", self.weights)
        if resumes and began != self.weights:
            raise CheckpointError(
                f"The run in {path.parent} began with other weights than {self.checkpoint.name} has now, and its "
                f"adapter was trained for them. Put them back, or start a new run in another --output."
            )
        if stored.get("evaluation") == asked:
            earlier: JsonObject = stored["found"]
            return earlier
        results = self.measure(model)
        if PartialState().is_main_process:
            write_json(path, {"evaluation": asked, "found": results})
        return results

    def after(self, model: nn.Module) -> tuple[JsonObject, CtxextError | None]:
        """Measure a trained model in all processes, and return the error of one that could not.

        The error is to be raised once all that was trained is written. Raised in one process, it would end the others.
        """
        results: JsonObject = {}
        failed: CtxextError | None = None
        try:
            results = self.measure(model)
        except CtxextError as error:
            failed = error
        for number, each in enumerate(gather_object([failed])):
            if failed is None and each is not None:
                failed = type(each)(f"The measurement after training failed in process {number}: {each}")
        return results, failed

    @torch.no_grad()
    def measure(self, model: nn.Module) -> JsonObject:
        """Measure as the settings say; return plain JSON values: ``perplexity`` (with its ``answer``) and ``passkey``.

        Args:
            model: Extended model, left in evaluation mode.
        """
        evaluation = self.settings.evaluation
        model.eval()
        results: JsonObject = {}
        now = Checkpoint(self.checkpoint.name, model, self.checkpoint.tokenizer, self.checkpoint.dtype_note)
        if self.plan is not None:
            # The original's losses inside the window come from the start: training changes the only model in memory.
            survey = prepare(now, self.corpus, self.plan, inside=self.inside, name="extended")
            self._finish(survey)
            result = survey.result()
            results["perplexity"] = result.to_dict() | {"answer": result.sentence()}
        if evaluation.passkey_lengths:
            keys = self._keys(now)
            self._finish(keys)
            (result_of_keys,) = trials_of(passkey.PasskeyResult, keys, haystack="noise")
            results["passkey"] = {
                "accuracy": result_of_keys.accuracy,
                "cells": [
                    {
                        "length": length,
                        "depth": depth,
                        "correct": cell.correct,
                        "trials": len(cell.trials),
                        "loss": cell.loss,
                    }
                    for (depth, length), cell in result_of_keys.cells.items()
                ],
            }
        return results

    def _keys(self, checkpoint: Checkpoint) -> Survey[Any]:
        """Lay out the passkeys for an extended model."""
        evaluation = self.settings.evaluation
        return passkey.prepare(
            checkpoint,
            lengths=evaluation.passkey_lengths,
            depths=evaluation.passkey_depths,
            trials=evaluation.passkey_trials,
            seed=self.settings.seed,
            name="extended",
        )

    def _plan(self) -> PerplexityPlan:
        """Plan the perplexity: patch once to learn the extension's length, and undo; later the model has it."""
        evaluation, extension = self.settings.evaluation, self.settings.extension
        lengths = [*evaluation.lengths, *([evaluation.window] if evaluation.window else [])]
        model = self.checkpoint.model
        plan = make_plan(model, lengths=lengths, method=extension.method, arguments=extension.arguments())
        if evaluation.window is not None and evaluation.window > plan.trained_length:
            raise InvalidParameterError(
                f"evaluation.window, {evaluation.window:,} tokens, is beyond the trained {plan.trained_length:,}, in "
                f"which the original checkpoint is compared. Give a smaller one, or leave it out."
            )
        return replace(plan, method=None, arguments={}, trained_length=evaluation.window or plan.trained_length)

    def _finish(self, survey: Survey[Any]) -> None:
        """Do all jobs with a bar. Every process does all of them, since engines may share weights."""
        jobs = survey.begin()
        console = terminal(stderr=True, quiet=not PartialState().is_main_process)
        console.print(f"Measuring: {len(jobs)} readings of long texts.")
        model = self.checkpoint.subject.model
        with arithmetic(self.settings, model), StageBar(console, sum(job.cost for job in jobs)) as progress:
            survey.measure(jobs, progress=progress)


def arithmetic(settings: Settings, model: Any) -> torch.autocast:
    """Return the context of a pass as in training: trained weights are float32, and compute in the model's dtype."""
    dtype: str = settings.dtype
    return torch.autocast(next(model.parameters()).device.type, dtype=DTYPES[dtype], enabled=dtype != "fp32")


def _extension(measurement: JsonObject) -> PerplexityReading | None:
    """Return the reading of the extended model; None if perplexity was not measured."""
    return PerplexityResult.from_dict(measurement["perplexity"]).extension if "perplexity" in measurement else None


def summary(measurement: JsonObject) -> str:
    """Summarise a measurement in a few sentences; return an empty text if nothing was measured."""
    sentences = []
    if (extension := _extension(measurement)) is not None:
        sentences.append(measurement["perplexity"]["answer"])
        if extension.in_window is not None:
            sentences.append(
                f"Inside the trained window it differs from the original checkpoint by {extension.in_window}."
            )
    if "passkey" in measurement:
        sentences.append(f"Passkeys found: {measurement['passkey']['accuracy']:.0%}.")
    return " ".join(sentences)


def gain(measurement: JsonObject) -> Gain:
    """Return the loss minus the best truncation's, by positions; empty if it was not measured."""
    extension = _extension(measurement)
    scores = extension.at(POSITIONS) if extension is not None else ()
    return [((span.start, span.stop), span.versus_truncation) for span in scores if span.versus_truncation is not None]
