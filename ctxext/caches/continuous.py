"""Continuous batching of a patched model (``generate_batch``): a manager of transformers' own, or a refusal.

Instances only: ``model.init_continuous_batching`` is replaced, through which every entry leads, and the manager that it
returns is a subclass of transformers' own (``paged_batch.PagedManager``).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager

from ctxext.caches.records import ATTENTION, PAGED_IN_LAYERS, attends_of
from ctxext.core.rebuild import FAILURES
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.methods import Method

ON_THE_DEVICE = ("use_cuda_graph", "use_async_batching", "varlen_compile_config", "decode_compile_config")
"""Settings of transformers under which a pass is a graph, or is queued before its requests are known."""


@dataclass
class ContinuousBatching:
    """Replacement of ``model.init_continuous_batching`` that returns a manager, or refuses."""

    subject: Subject
    method: Method
    by_layout: bool

    @property
    def is_special(self) -> bool:
        """True if positions depend on the request, or attention is not the model's own."""
        return self.method.dynamic or self.by_layout

    def require(self) -> None:
        """Raise ``IncompatibleError`` if continuous batching would be wrong; the model's weights may be missing."""
        if self.is_special and (reason := self.why_not()):
            raise self._refusal(reason)

    def __call__(
        self,
        generation_config: Any = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """Return the manager that was kept, or a new one.

        Raises:
            IncompatibleError: if continuous batching would be wrong, or settings need a compiled graph.
            InvalidParameterError: if no number of new tokens is set, and the method needs one.
        """
        self.require()
        if workload_hints is not None:
            self.require_limit(workload_hints.max_generated_length or None)
        model: Any = self.subject.model
        if (kept := getattr(model, "_cached_continuous_batching_manager", None)) is not None:
            kept.switch_to_cb_friendly_attn(model, kept.continuous_batching_config.auto_switch_to_flash)
            return kept
        settings = copy.copy(model.generation_config if generation_config is None else generation_config)
        if settings.eos_token_id is None:
            settings.eos_token_id = -1  # as transformers does: no token ends a text
        given = continuous_batching_config or getattr(settings, "continuous_batching_config", None)
        given = given or ContinuousBatchingConfig()
        from ctxext.caches.paged_batch import PagedManager  # few ever batch continuously

        manager = PagedManager(
            self,
            generation_config=settings,
            continuous_batching_config=self._on_the_host(given) if self.is_special else given,
            workload_hints=workload_hints,
        )
        if not self.is_special:
            return manager
        try:
            manager.try_a_pass()
        except (CtxextError, *FAILURES) as error:
            manager.restore_attention()
            raise self._refusal(
                f"a pass with transformers' paged cache fails ({type(error).__name__}: {error})"
            ) from error
        return manager

    def _refusal(self, reason: str) -> IncompatibleError:
        return IncompatibleError(
            f"Method {self.method.name!r} does not work with continuous batching (generate_batch) here: {reason}. Call "
            f"generate() with a padded batch instead."
        )

    def why_not(self) -> str | None:
        """Return why continuous batching would be wrong; None if a pass may be tried."""
        kinds = set(getattr(self.subject.text, "layer_types", None) or ())
        unfit = sorted(kinds - {"full_attention", "sliding_attention"})
        if self.method.dynamic and getattr(self.method, "growth", None) != "request":
            return "positions would change while a text grows; with growth='request' they do not"
        reads_pages = [getattr(each, "reads_pages", False) for each in attends_of(self.subject.model).values()]
        if self.by_layout and not (reads_pages and all(reads_pages)):
            return "its attention reads no paged cache"
        if not PAGED_IN_LAYERS:
            return f"it needs transformers 5.24 or newer, and {transformers.__version__} is installed"
        if unfit:
            return f"transformers keeps no paged cache for layers of type {unfit[0]!r}"
        return None

    def require_limit(self, max_new_tokens: int | None) -> None:
        """Raise unless the method does without the number of new tokens, or it is set."""
        if self.method.dynamic and max_new_tokens is None:
            raise InvalidParameterError(
                f"max_new_tokens is not set. Method {self.method.name!r} with growth='request' fits positions to the "
                f"tokens that a request may reach. Pass max_new_tokens."
            )

    def _on_the_host(self, settings: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
        """Return settings under which a pass runs when its requests are known, and without a graph."""
        for name in (*ON_THE_DEVICE, "default_compile_level"):
            value = getattr(settings, name)
            if any(value) if isinstance(value, tuple) else value:
                raise IncompatibleError(
                    f"{name}={value} of ContinuousBatchingConfig: ctxext reads the lengths of requests before each "
                    f"pass, which a graph or a queued pass cannot do. Leave it at its default."
                )
        settings = copy.copy(settings)
        settings.use_cuda_graph = settings.use_async_batching = False
        # Keys of a shared prefix would have the positions of another request's length.
        settings.allow_block_sharing = settings.allow_block_sharing and not self.method.dynamic
        return settings


def _refuse_managed(work: Work) -> None:
    """Refuse a model whose attention a manager has set."""
    base = work.subject.model
    raise PatchStateError(
        f"A manager of continuous batches has set the attention of this {type(base).__name__} to "
        f"{base.config._attn_implementation!r}. Stop the manager first, or call model.set_attn_implementation."
    )


def _batch_continuously(work: Work) -> None:
    """Install a continuous-batching manager or a refusal, and discard a manager cached before patching.

    An earlier manager would share the blocks of equal prompts, whose keys have other positions.
    """
    model, method, edits = work.subject.model, work.method, work.edits
    edits.set(model, "_cached_continuous_batching_manager", None)
    decoders = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    by_layout = any(decoder.config._attn_implementation == ATTENTION for decoder in decoders)
    if method.dynamic or by_layout or PAGED_IN_LAYERS:
        edits.set(model, "init_continuous_batching", ContinuousBatching(work.subject, method, by_layout))


register(
    Step(
        Moment.CHECK,
        _refuse_managed,
        applies=lambda work: str(work.subject.config._attn_implementation).startswith("paged|"),
    )
)
register(
    Step(
        Moment.MODULES,
        _batch_continuously,
        applies=lambda work: hasattr(work.subject.model, "init_continuous_batching"),
    )
)
