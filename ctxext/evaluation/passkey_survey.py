"""Passkeys asked of several readers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict

from torch import nn

from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.evaluation import passkey
from ctxext.evaluation.checkpoint import Checkpoint
from ctxext.evaluation.corpus import special_prefix
from ctxext.evaluation.forward import Progress, pass_cost, ticking, turning_point
from ctxext.evaluation.haystack import Haystack
from ctxext.evaluation.passkey import DEPTHS, PasskeyReport, PasskeyResult, PasskeyTrial
from ctxext.evaluation.provenance import Provenance
from ctxext.evaluation.survey import Prompt, Survey, Trial

__all__ = ["passkey_prompts", "passkey_report"]


def passkey_prompts(
    checkpoint: Checkpoint,
    haystack: Haystack,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    trials: int = 1,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts at every length and depth; arguments as for ``passkey.run``.

    Raises:
        InvalidParameterError: nothing to ask, or as ``passkey.build``.
    """
    made = passkey.make_prompts(checkpoint.tokenizer, lengths, depths, trials=trials, seed=seed, haystack=haystack)
    if not made:
        raise InvalidParameterError("There is nothing to ask; give at least one length, one depth and one trial.")
    prefix = len(special_prefix(checkpoint.tokenizer))
    cost = functools.partial(pass_cost, turning_point=turning_point(checkpoint.model))

    def ask(
        prompt: passkey.PasskeyPrompt, model: nn.Module, window: int | None, progress: Progress, name: str
    ) -> Trial:
        with ticking(model, name, cost(window or prompt.length) / passkey.passes(model, prompt.passkey), progress):
            trial = passkey.ask(model, prompt, window=window, prefix=prefix)
        if not math.isfinite(trial.loss):
            raise IncompatibleError(
                f"The model computes losses that are no numbers: {name}. Measure in another --dtype (fp32 has the "
                f"range), or leave this method out. Finished trials are kept."
            )
        return asdict(trial)

    return [
        Prompt(
            name=f"{one.length:,} tokens at {one.passkey.depth:.0%}" + (f", seed {one.seed}" if trials > 1 else ""),
            length=one.length,
            identity=[one.passkey.sha256, prefix, passkey.JUDGED],
            cost=cost,
            ask=functools.partial(ask, one),
        )
        for one in made
    ]


def passkey_report(survey: Survey, haystack: Haystack, provenance: Provenance) -> PasskeyReport:
    """What a finished survey of passkeys found."""
    readings = [
        PasskeyResult(
            trials=tuple(PasskeyTrial(**trial) for trial in trials),
            haystack=haystack.name,
            reading=reader.reading.name,
            label=reader.reading.label,
        )
        for reader, trials in survey.trials()
    ]
    return PasskeyReport(
        readings=tuple(readings),
        trained_length=survey.panel.trained_length,
        provenance=survey.with_extensions(provenance),
    )
