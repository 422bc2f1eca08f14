"""Continuous batching of a patched model (``generate_batch``): a manager of transformers' own, or a refusal.

Instances only: ``model.init_continuous_batching`` is replaced, through which every entry leads, and the manager that it
returns is a subclass of transformers' own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestState
from transformers.generation.continuous_batching.requests import FutureRequestState

from ctxext.caches.call import ATTENTION
from ctxext.caches.paged_batch import REACHES
from ctxext.caches.records import PAGED_IN_LAYERS, guards_of
from ctxext.core.rebuild import FAILURES
from ctxext.core.steps import Moment, Step, Work, register
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError, InvalidParameterError, PatchStateError
from ctxext.methods import Method

ON_THE_DEVICE = ("use_cuda_graph", "use_async_batching", "varlen_compile_config", "decode_compile_config")
"""Settings of transformers under which a pass is a graph, or is queued before its requests are known."""


class PagedManager(ContinuousBatchingManager):  # type: ignore[misc]
    """Manager of continuous batching for a patched model, which declares how long each request may become.

    It serves the model under the extension under which it was made, and no other.
    """

    continuous_batching_config: Any

    def __init__(self, batching: ContinuousBatching, **settings: Any) -> None:
        self._batching = batching
        self._extension = guards_of(batching.subject.model)[0].extension
        super().__init__(batching.subject.model, **settings)

    def _require_extended(self) -> None:
        """Raise ``PatchStateError`` if the extension of the model changed after this manager was made."""
        guards = guards_of(self._batching.subject.model)
        if not guards or guards[0].extension != self._extension:
            raise PatchStateError(
                f"This manager of continuous batches was made while the model was extended by "
                f"{self._extension.said}. Now it is extended otherwise, or not at all, so keys in its "
                f"cache have other positions. Make a new one: model.init_continuous_batching()."
            )

    def _create_batch_processor(self) -> Any:
        """Create what holds the paged cache, and record the extension on that."""
        self._require_extended()
        processor = super()._create_batch_processor()
        guards_of(self._batching.subject.model)[0].claim(processor.cache)
        return processor

    def switch_to_cb_friendly_attn(self, *args: Any, **kwargs: Any) -> None:
        """Keep ctxext's attention; a model without it goes on transformers' paged one."""
        if not self._batching.by_layout:
            super().switch_to_cb_friendly_attn(*args, **kwargs)

    def add_request(self, input_ids: list[int], *args: Any, max_new_tokens: int | None = None, **kwargs: Any) -> Any:
        """Add a request as transformers does; a dynamic method needs its number of new tokens."""
        self._require_extended()
        self._batching.require_limit(
            self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        )
        return super().add_request(input_ids, *args, max_new_tokens=max_new_tokens, **kwargs)

    def try_a_pass(self) -> None:
        """Run a pass over two tokens in a small cache, in the thread of the caller, who sees its failure."""
        settings = self.continuous_batching_config
        small = {"page_size": 4, "num_blocks": self._batching.subject.text.num_hidden_layers}
        small |= {"max_batch_tokens": 4, "max_requests_per_batch": 1, "cpu_offload_space": 0.0}
        self.continuous_batching_config = copy.copy(settings)
        vars(self.continuous_batching_config).update(small)
        self.batch_processor = processor = self._create_batch_processor()
        request = RequestState("trial", [0, 0], max_new_tokens=1, tokens_to_process=[0, 0])
        processor.cache.can_store_request_tokens(request, 2)
        inputs = processor.inputs_and_outputs
        requests = [FutureRequestState(request, has_new_token=True, complete_blocks={}, query_length=2)]
        sizes = {"use_decode_fast_path": False, "num_q_tokens": 2, "max_kv_read": 0, "use_padding": False}
        inputs.prepare_batch_tensors(requests, self.logit_processor, **sizes)
        self._declare()
        with torch.no_grad():
            self.model(**inputs.get_model_kwargs())
        self.batch_processor, self.continuous_batching_config = None, settings

    def restore_attention(self) -> None:
        """Give the model back the attention that it had before this manager."""
        if self._original_attn_impl is not None:
            self.model.set_attn_implementation(self._original_attn_impl)

    def _declare(self) -> None:
        """Record on the cache how long each request of the next pass may become."""
        if self._batching.method.dynamic:
            states = [request.state for request in self.batch_processor.inputs_and_outputs.requests_in_batch]
            reaches = [len(state.initial_tokens) + state.max_new_tokens for state in states]
            setattr(self.batch_processor.cache, REACHES, reaches)

    def _generation_step(self) -> None:
        """Run a pass over the requests of a batch."""
        self._declare()
        super()._generation_step()


@dataclass
class ContinuousBatching:
    """Replacement of ``model.init_continuous_batching`` that returns a manager, or refuses."""

    subject: Subject
    method: Method
    by_layout: bool

    @property
    def attends(self) -> list[Any]:
        """Objects that compute attention instead of the model's layers."""
        modules = (vars(module) for module in self.subject.model.modules())
        return [attributes["_ctxext_attend"] for attributes in modules if "_ctxext_attend" in attributes]

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
        reads_pages = [getattr(attend, "reads_pages", False) for attend in self.attends]
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
