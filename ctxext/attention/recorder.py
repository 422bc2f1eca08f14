"""Record the attention that each key-value group of a model pays to what a text said before, while the model reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ctxext.attention.attend import LayerCall, attention_function, put_in_evaluation
from ctxext.attention.engines import RemapAttend
from ctxext.attention.repetition import LEAST, Repetition, inductions
from ctxext.caches.digest import is_shared_out, shares_heads
from ctxext.caches.records import attends_of
from ctxext.core.edits import Edits
from ctxext.core.patching import patched_state
from ctxext.core.rebuild import FAILURES
from ctxext.core.subject import Subject
from ctxext.errors import CtxextError, IncompatibleError, PatchStateError
from ctxext.kernels.base import without_autocast
from ctxext.methods.retrieval_heads import RetrievalHeads

RECORDING = "ctxext_heads"
CHUNK = 256  # queries whose attention weights exist at a time


@dataclass
class Recorder:
    """Attention of a model's layers to what a text said before, summed up while the model reads it.

    Args:
        own: name of the attention implementation that the model had before.
        layers: for each attention layer so far, the score of each of its groups; the best of all its calls.
        windowed: the layers among them that look back over a window only.
        lifted: True if windows count only where they hide a part of the text.
    """

    subject: Subject
    own: str
    lifted: bool = False
    text: Repetition | None = None
    layers: dict[nn.Module, Float[Tensor, " groups"]] = field(default_factory=dict)
    windowed: set[nn.Module] = field(default_factory=set)

    def run(self, text: Repetition) -> list[Float[Tensor, " groups"]]:
        """Read a text, and return the scores of each layer's groups.

        Raises:
            IncompatibleError: no layer calls transformers' attention interface, or the model's code fails.
        """
        self.text, self.layers = text, {}
        model = self.subject.model
        try:
            reads: nn.Module = model.get_input_embeddings()
        except NotImplementedError:  # it reads sound, or has several tables
            reads = model
        device = next(reads.parameters()).device
        try:
            ids = text.tokens[None].to("cpu" if device.type == "meta" else device)
            model.base_model(input_ids=ids, use_cache=False)
        except CtxextError:
            raise
        except FAILURES as error:
            raise IncompatibleError(
                f"{type(model).__name__} fails on {len(text.tokens)} tokens while ctxext records its attention: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self.layers or self.windowed == self.layers.keys():
            raise _not_recorded(self.subject)
        return list(self.layers.values())

    def record(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: Any) -> None:
        """Compute the attention of the chosen queries by the model's own eager function, in float32."""
        text = self.text
        assert text is not None  # run() has set it
        tokens, window = len(text.tokens), given.get("sliding_window")
        if window is not None and not (self.lifted and window >= tokens):
            # It can read no farther, whatever it has learned.
            self.layers.setdefault(module, torch.zeros(key.shape[1], dtype=torch.float32, device="cpu"))
            self.windowed.add(module)
            return
        if not isinstance(mask, Tensor) or mask.shape[-2:] != (tokens, tokens) or query.shape[2] != tokens:
            raise IncompatibleError(
                f"{type(module).__name__} attends to {key.shape[2]} keys of a text of {tokens} tokens, under a mask of "
                f"its own. ctxext cannot record which heads retrieve there."
            )
        keys, values = key.float(), value[..., :1].float()
        eager = attention_function(module, "eager")
        total = torch.zeros(query.shape[1], dtype=torch.float32, device=query.device)
        first, last = int(text.queries[0]), int(text.queries[-1])
        for start in range(first, last + 1, CHUNK):
            stop = min(start + CHUNK, last + 1)
            here = (text.queries >= start) & (text.queries < stop)
            rows = _as_bias(mask[..., start:stop, :])
            if bool((rows[..., 0, start + 1 :] == 0).any()):
                raise IncompatibleError(
                    f"{type(module).__name__} lets tokens see later ones, so it has nothing to retrieve. Heads that "
                    f"retrieve are found in models that predict the next token."
                )
            bias = given.get("position_bias")
            part = {} if bias is None else {"position_bias": bias[:, :, start:stop]}
            with without_autocast(query.device):  # which would leave the scores three digits
                _, weights = eager(module, query[:, :, start:stop].float(), keys, values, rows, **given | part)
            at, twins = (text.queries[here] - start).to(weights.device), text.twins[here].to(weights.device)
            total += weights[0][:, at, twins].float().sum(-1) + weights[0][:, at, twins + 1].float().sum(-1)
        groups = (total / len(text.queries)).view(key.shape[1], -1).amax(-1).cpu()
        self.layers[module] = torch.maximum(groups, self.layers.get(module, groups))


def _as_bias(mask: Tensor) -> Tensor:
    """Return a mask in the form that is added to scores, in float32. It has true or 0 for the tokens that are seen."""
    if mask.dtype != torch.bool:
        return mask.float()
    zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(torch.float32).min)


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextlib.contextmanager
def recording(subject: Subject, *, lifted: bool = False) -> Iterator[Recorder]:
    """Make a model record its attention, in evaluation mode; put everything back at the end.

    Raises:
        IncompatibleError: the model's attention does not go through transformers' interface, or it has an encoder.
        PatchStateError: the model is patched.
    """
    model = subject.model
    if patched_state(model) is not None:
        raise PatchStateError(
            f"This {type(model).__name__} is extended by ctxext, and its heads are found without that. Call "
            f"ctxext.unpatch first."
        )
    if subject.config.is_encoder_decoder:
        raise IncompatibleError(
            f"{type(model).__name__} is an encoder-decoder. Heads that retrieve are found in models that predict the "
            f"next token of one text."
        )
    if shares_heads(model) or is_shared_out(model):
        raise IncompatibleError(
            f"Processes share the weights of this {type(model).__name__}, and heads are scored in a whole model. "
            f"Load it whole to score its heads."
        )
    if not type(model)._can_set_attn_implementation():
        raise _not_recorded(subject)
    # Other kernels than these two take no mask of all queries and keys, from which the weights are computed.
    own = subject.text._attn_implementation
    if own not in ("eager", "sdpa"):
        own = "sdpa" if model._supports_sdpa else "eager"
    recorder, edits = Recorder(subject, own, lifted), Edits()
    token = _recorder.set(recorder)
    try:
        inside = (part.config for part in model.modules() if isinstance(part, PreTrainedModel))
        for config in (subject.text, *inside):  # one object for text, unless the model's config was replaced
            if type(config) is type(subject.text):
                edits.set(config, "_attn_implementation_internal", RECORDING)
        put_in_evaluation(model, edits)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield recorder
    finally:
        edits.undo()
        _recorder.reset(token)


def _not_recorded(subject: Subject) -> IncompatibleError:
    return IncompatibleError(
        f"No attention of {type(subject.model).__name__} reaches beyond a window and goes through transformers' "
        f"attention interface, so ctxext cannot record which heads retrieve."
    )


def _running() -> Recorder:
    recorder = _recorder.get()
    if recorder is None:
        raise PatchStateError(
            f"The attention implementation {RECORDING!r} works inside ctxext.heads only. Choose another by "
            f"model.set_attn_implementation('sdpa')."
        )
    return recorder


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """Record the attention to what was said before, and compute the layer's output by the model's own attention."""
    recorder = _running()
    recorder.record(module, query, key, value, attention_mask, given)
    own = attention_function(module, recorder.own)
    result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **given)
    return result


def _mask(**arguments: Any) -> Tensor:
    """Return the mask that the model's own attention takes, always of all queries and keys."""
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = ALL_MASK_ATTENTION_FUNCTIONS[_running().own](**arguments)
    return mask


@torch.no_grad()
def retrieval_share(model: Any, *, seed: int = 0) -> float:
    """Measure the attention that the heads which read far pay to what a text said before, in a model extended by them.

    The induction probe of ``heads`` in one pass, inside the window in which the extension changes nothing.

    Returns:
        The mean over the groups that read far, from 0 to 1.

    Raises:
        IncompatibleError: the extension changes texts as short as the probe, or processes share the weights.
        PatchStateError: the model is not extended by ``retrieval_heads``.
    """
    subject, edits = Subject.of(model), Edits()
    patched = patched_state(subject.model)
    if patched is None or not isinstance(patched.method, RetrievalHeads):
        raise PatchStateError(f"This {subject.kind} is not extended by retrieval_heads, so no heads of it read far.")
    if is_shared_out(subject.model):
        raise IncompatibleError(
            "Processes share the weights of this model, and its heads are measured in a whole one. Measure none, or "
            "take data parallelism (recipes/accelerate/ddp.yaml)."
        )
    layers = {layer: by for layer, by in attends_of(subject.model).items() if isinstance(by, RemapAttend)}
    exact = min(by.exact_length for by in layers.values())
    if exact < LEAST:
        raise IncompatibleError(
            f"This extension changes texts of more than {exact} tokens, and heads are measured where it changes "
            f"nothing, on {LEAST} or more. Set exact to true and temperature to none, or measure no heads."
        )
    recorder = Recorder(subject, "eager")

    # The layers compute as they do under the extension; what each gets is recorded on the way.
    def watched(by: RemapAttend) -> Any:
        def attend(layer: LayerCall) -> Tensor:
            recorder.record(layer.module, layer.q, layer.k, layer.v, layer.mask.under("eager"), layer.given)
            return by(layer)

        return attend

    try:
        put_in_evaluation(subject.model, edits)
        for module, by in layers.items():
            edits.set(module, "_ctxext_attend", watched(by))
        (text,) = inductions(subject, [seed], exact)
        recorder.run(text)
    finally:
        edits.undo()
    far: list[Tensor] = []
    for module, by in layers.items():
        scores = recorder.layers[module]
        if by.heads is not None:
            far.append(scores[list(by.heads.far.numbers)])
        elif by.kind == "all":
            far.append(scores)
    return float(torch.cat(far).mean())


AttentionInterface.register(RECORDING, _attention)
AttentionMaskInterface.register(RECORDING, _mask)
