"""A causal model's own logits, a slice of positions at a time, for the price of one forward pass."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from ctxext.caches.prefix import virtual_tokens
from ctxext.caches.records import cache_argument
from ctxext.core.architecture import find_architecture
from ctxext.core.patching import describe, patched_state
from ctxext.core.scaling import heads_of, of_layers, rope_follows_length
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.measuring.head import Replay, StandIn, require_pieces, shell_of
from ctxext.models.sinusoid import remaker_of, rotates_by_table
from ctxext.models.table import TableArchitecture
from ctxext.models.unknown import towers_of


def logits_in_chunks(
    model: nn.Module,
    input_ids: Int[Tensor, "batch positions"],
    *,
    start: int = 0,
    chunk: int | None = 1024,
    cached: int | None = None,
) -> Iterator[tuple[int, Float[Tensor, "batch piece vocab"]]]:
    """Yield ``(first position, logits)`` for consecutive pieces of the positions from ``start`` on.

    The layers run once over all positions, uncached and without an attention mask (so that a causal kernel serves
    them and no positions x positions matrix exists). The part after the layers - projection, scaling, soft cap,
    whatever the model's class does there - then runs once per piece, so that positions x vocabulary never exists
    either. The model is not touched: the pieces go through a shallow copy of its outermost module, in which a
    stand-in replays slices of the hidden states.

    Args:
        start: first position of interest, in tokens; the logits before it are not computed.
        chunk: positions per piece, at least 1; None for ``head_chunk``. One piece takes about batch x chunk x
            vocabulary x 8 bytes.
        cached: run the layers over that many tokens at a time, with a KV cache; the same result up to rounding, in
            less memory and more time. A caller that has seen enough stops iterating, and only the tokens that were read
            cost time. None for one uncached pass.

    Raises:
        InvalidParameterError: empty input, or ``start``, ``chunk`` or ``cached`` out of range.
        IncompatibleError: the model is in training mode, is an encoder-decoder, adds virtual tokens (prompt
            learning), or does not put its layers behind one base model.
    """
    positions = input_ids.shape[1]
    for name, value in (("chunk", chunk), ("cached", cached)):
        if value is not None and value < 1:
            raise InvalidParameterError(f"{name} must be at least 1 position, found {value}.")
    if not 0 <= start < positions:
        raise InvalidParameterError(
            f"start must be from 0 to {positions - 1} for {positions} positions, found {start}."
        )
    subject, shell, replay = opened(model)
    check_known(model, input_ids)
    chunk = chunk or head_chunk(subject)
    forget_longest(subject)
    piece = min(cached or positions, positions)
    if piece < positions:
        replay.real = CachedPieces(subject, replay.real, positions=positions)
    for begin in range(0, positions, piece):
        part = input_ids[:, begin : begin + piece]
        replay.output = None  # so that the layers run on, over the next tokens
        for first in range(min(max(start - begin, 0), part.shape[1] - 1), part.shape[1], chunk):
            replay.piece = slice(first, min(first + chunk, part.shape[1]))
            replay.calls = 0
            # The first call hands all tokens to the real layers; later ones only have to look like their piece.
            ids = part if replay.output is None else part[:, replay.piece]
            logits = shell(input_ids=ids, use_cache=False, return_dict=True).logits
            require_pieces(shell, replay, logits)
            if begin + first >= start:  # of tokens before that, a cache alone is needed
                yield begin + first, logits


@torch.no_grad()
def logits_of_answers(
    model: nn.Module,
    text: Int[Tensor, " text"],
    requests: Sequence[Int[Tensor, " _"]],
    answers: Sequence[Int[Tensor, " _"]],
) -> list[list[Float[Tensor, "_ vocab"]]]:
    """Compute the logits that predict each of several answers behind each of several requests; the text is read once.

    The layers keep the text in a KV cache, and every request goes on from a copy of that. A dynamic method fits its
    positions to the text with the longest request and answer, so that all are judged with the same positions.
    Text, requests and answers have at least one token each.

    Returns:
        Logits in float32, by request and by answer: row ``i`` predicts token ``i`` of the answer.

    Raises:
        IncompatibleError: as in ``logits_in_chunks``, or the model takes no cache.
    """
    subject, shell, replay = opened(model)
    check_known(model, text)
    longest = sum(max(tokens.shape[0] for tokens in part) for part in (requests, answers))
    reader = replay.real = CachedPieces(subject, replay.real, positions=text.shape[0] + longest)

    def run(ids: Tensor, *, behind: DynamicCache | None = None, last: bool = True) -> Tensor:
        """Read tokens behind a copy of a cache; return the logits of the last position, or of all."""
        reader.cache = reader.cache if behind is None else copy.deepcopy(behind)
        tokens = ids.shape[0]
        replay.output, replay.calls = None, 0  # without an output, the layers run on
        replay.piece = slice(tokens - 1 if last else 0, tokens)
        logits: Tensor = shell(input_ids=ids[None], use_cache=False, return_dict=True).logits
        require_pieces(shell, replay, logits)
        return logits[0].float()

    run(text)
    read, logits = reader.cache, []
    for request in requests:
        first = run(request, behind=read)
        asked = reader.cache
        logits.append(
            [
                # The last token of the request predicts the first of the answer; nothing follows its last token.
                torch.cat([first, run(answer[:-1], behind=asked, last=False)]) if answer.shape[0] > 1 else first
                for answer in answers
            ]
        )
    return logits


def opened(model: nn.Module) -> tuple[Subject, PreTrainedModel, Replay]:
    """Unwrap and open a model (see ``shell_of``); refuse it if its losses would differ from the plain model's."""
    subject = Subject.of(model)
    if (peft := virtual_tokens(subject)) is not None:
        raise IncompatibleError(
            f"The adapter ({peft.peft_type}) puts virtual tokens before the text, so positions are not those of the "
            f"text. Evaluate the base model, or an adapter that changes weights (LoRA and its kin)."
        )
    require_evaluation(subject.model)
    return subject, *shell_of(subject.model)


def require_evaluation(model: PreTrainedModel) -> None:
    """Raise ``IncompatibleError`` for a model in training mode."""
    if model.training:
        raise IncompatibleError(
            f"{type(model).__name__} is in training mode, where dropout is noise. Call model.eval() first."
        )


def check_token_ids(input_ids: Tensor) -> None:
    """Raise ``InvalidParameterError`` unless ``input_ids`` is [batch, tokens], of integers, at least two in a row."""
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise InvalidParameterError(
            f"input_ids must be integers of shape [batch, tokens], found {input_ids.dtype} {list(input_ids.shape)}."
        )
    if input_ids.shape[0] < 1 or input_ids.shape[1] < 2:
        raise InvalidParameterError(f"input_ids must hold at least one row of 2 tokens, found {list(input_ids.shape)}.")


def check_known(model: nn.Module, ids: Tensor, *, predicted: bool = False) -> None:
    """Raise ``InvalidParameterError`` for a token that a tokenizer has and its model lacks, before the model fails.

    Some tokens are read and never ``predicted``, such as the one for an image of Mllama.
    """
    subject = Subject.of(model)
    known = getattr(subject.model.get_input_embeddings(), "num_embeddings", None)
    if predicted and known is not None:
        known = min(known, getattr(subject.model.get_output_embeddings(), "out_features", known))
    if known is not None and ids.numel() and int(ids.max()) >= known:
        raise InvalidParameterError(
            f"The text has token {int(ids.max()):,} of its tokenizer, and this {subject.kind} knows {known:,} tokens. "
            f"Take the tokenizer that the model was trained with, or leave such tokens out."
        )


class CachedPieces(StandIn):
    """Replacement of a base model that reads a text of ``positions`` tokens in pieces, one in each call.

    Raises:
        IncompatibleError: the positions follow the length of a call's input in a way that cannot be told otherwise,
            or the model takes no cache, or does not go on from it.
    """

    def __init__(self, subject: Subject, base: nn.Module, *, positions: int) -> None:
        super().__init__(base)
        self.cache = DynamicCache(config=subject.config)
        dynamic, argument = follows_length(subject), cache_argument(base)
        if argument is None:
            raise IncompatibleError(
                f"{type(base).__name__} takes no cache, so a text cannot be read in cached pieces. Where --memory "
                f"asked for these, allow more."
            )
        if not goes_on(subject):
            raise IncompatibleError(
                f"{type(base).__name__} does not go on from the state of earlier tokens, so a text cannot be read in "
                f"cached pieces. Where --memory asked for these, allow more."
            )
        self.argument = argument
        # Positions of a dynamic method follow the length of the whole text, which a piece does not show.
        self.length = {"ctxext_length": positions} if dynamic else {}
        if dynamic and patched_state(subject.model) is None:
            raise IncompatibleError(
                f"The positions of this {type(subject.model).__name__} follow the length of its input "
                f"(rope_parameters={subject.text.rope_parameters}), so a text cannot be read in cached pieces. Extend "
                f"it with ctxext, or, where --memory asked for pieces, allow more."
            )

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        options = kwargs | self.length | {self.argument: self.cache, "use_cache": True, "return_dict": True}
        with without_images(self.real):
            output = self.real(input_ids=input_ids, **options)
        setattr(output, self.argument, None)
        return output


@torch.no_grad()
def goes_on(subject: Subject) -> bool:
    """Return whether a model goes on from a cache as from the tokens in it.

    Recurrent models may not: Mamba's first form (Jamba, Zamba) scans several tokens without the state before them, and
    RecurrentGemma keeps its state outside of the cache.
    """
    model: Any = subject.model
    try:
        takes_it = not isinstance(model, GenerationMixin) or bool(model._supports_default_dynamic_cache())
        if not (takes_it and model._is_stateful):
            return takes_it
        known = subject.ordinary_tokens
        tokens = known[torch.arange(TRIED) % len(known)][None].to(next(model.parameters()).device)
        name, cache, half = cache_argument(model) or "past_key_values", DynamicCache(config=model.config), TRIED // 2
        with without_images(model):
            model(tokens[:, :half], use_cache=True, **{name: cache})
            found = model(tokens[:, half:], use_cache=True, **{name: cache}).logits
        expected = model(tokens, use_cache=False).logits[:, half:]
        return bool((found - expected).abs().max() <= 0.05 * expected.abs().max())
    except (AttributeError, TypeError, ValueError):  # of a state that has no keys
        return False


@contextlib.contextmanager
def without_images(model: nn.Module) -> Iterator[None]:
    """Read texts that hold no image; a model that has read one keeps its state for the text that goes on from it.

    Classes whose positions have several axes (Qwen2-VL) keep how far the images of the latest text moved the tokens
    behind them, and move every text so that goes on from a cache.
    """
    told = [module for module in model.modules() if vars(module).get("rope_deltas") is not None]
    moved: dict[Any, Any] = {module: module.rope_deltas for module in told}
    for module in moved:
        module.rope_deltas = None
    try:
        yield
    finally:
        for module, deltas in moved.items():
            module.rope_deltas = deltas


def forget_longest(subject: Subject) -> None:
    """Let a short text follow a long one: transformers keeps the frequencies of the longest text so far."""
    if follows_unextended(subject):
        for module in subject.model.modules():
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                setattr(module, name, 0)


def last_position(subject: Subject) -> int | None:
    """Return the tokens that a model has positions for, where tables hold them; None where it reads any number."""
    model, family = subject.model, find_architecture(subject)
    ends = isinstance(family, TableArchitecture) or rotates_by_table(model) or subject.kind == "mpt"
    grows = any(map(remaker_of, model.modules()))
    return describe(model).target_length if ends and not grows else None


def check_positions(subject: Subject, length: int) -> None:
    """Raise ``InvalidParameterError`` if a model has no positions for ``length`` tokens."""
    last = last_position(subject)
    if last is not None and length > last:
        raise InvalidParameterError(
            f"This {subject.kind} has positions for {last:,} tokens and cannot read {length:,}. Extend it (--method "
            f"and --factor), or ask for at most {last:,}."
        )


def follows_length(subject: Subject) -> bool:
    """Return whether positions follow the length of the text, by a dynamic method or by a rope type of transformers."""
    patched = patched_state(subject.model)
    if patched is not None:
        return patched.method.dynamic
    return rope_follows_length(subject.text)


def follows_unextended(subject: Subject) -> bool:
    """Return whether an unextended model's positions follow the length of its input, by a rope type of transformers."""
    return patched_state(subject.model) is None and rope_follows_length(subject.text)


def fitted_length_of(subject: Subject, trained_length: int = 0) -> Callable[[int], int]:
    """Return a function from tokens to the length that their positions are fitted to; equal lengths, equal positions.

    Up to ``trained_length`` tokens, 0 if unknown, a stock rope type leaves positions as they are.
    """
    patched = patched_state(subject.model)
    if patched is not None:
        method, trained = patched.method, patched.extension.trained_length
        return lambda length: method.fitted_length(trained, length)
    follows = follows_length(subject)
    return lambda length: max(length, trained_length) if follows else 0


LEAST = 256
TRIED = 24  # tokens that show whether a model goes on from a cache
# Bytes that the logits of one piece and their softmax may take, and the fewest positions that a piece is worth.
HEAD_BYTES, HEAD_LEAST = 128 * 2**20, 128


def head_chunk(subject: Subject) -> int:
    """Positions whose logits exist at a time, so that they and their softmax take about 128 MiB."""
    return max(HEAD_LEAST, int(HEAD_BYTES // (subject.text.vocab_size * 10)))


def pass_bytes(subject: Subject, tokens: int, *, cached: int | None = None) -> int:
    """About what the model's weights and one pass over a text take at the peak, logits apart.

    ``cached`` is as in ``logits_in_chunks``.
    """
    base, config = subject.model, subject.text
    weights: int = sum(parameter.numel() * parameter.element_size() for parameter in base.parameters())
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    heads, key_heads, head_dim = heads_of(config)
    experts = max(int(count or 1) for count in of_layers(config, "num_experts_per_tok"))
    inner = max(int(width or 4 * hidden) for width in of_layers(config, "intermediate_size")) * experts
    size: int = base.dtype.itemsize
    # A layer's residual, norm (computed in float32), queries and keys before and after rotation; or its feed-forward.
    attention = size * (4 * hidden + 3 * (heads + 2 * key_heads) * head_dim) + 8 * hidden
    layer = max(attention, size * (3 * hidden + 3 * inner))
    # Without a fused kernel, scores exist for every query and key, in float32 for the softmax.
    scores = heads * tokens * (size + 4) if config._attn_implementation == "eager" else 0
    if cached is None:
        return weights + tokens * (layer + scores)
    cache = 2 * layers * key_heads * head_dim * size * tokens
    # A layer of the cache grows by a copy, and a mask exists as booleans and as numbers.
    grown, mask = cache // layers, cached * tokens * (1 + max(4, size))
    return weights + cached * (layer + scores) + cache + grown + mask + 2 * tokens * hidden * size


def cached_tokens_for(subject: Subject, tokens: int, budget: int | None) -> int | None:
    """Tokens per cached call that keep a pass within ``budget``; None where one uncached pass does.

    The uncached pass is preferred: it gives the same losses, is two to three times as fast on a CPU, and with a fused
    attention kernel it often takes less memory than a cache of all layers. Pieces help where scores of all queries and
    keys would exist, or where many heads share keys. ``budget`` is in bytes, None for no limit.

    Raises:
        InvalidParameterError: not even pieces of 256 tokens fit, or the model has no attention.
    """
    if budget is None:
        return None
    if of_layers(subject.text, "num_attention_heads") == [None]:
        raise InvalidParameterError(
            f"The passes of a {subject.kind} cannot be estimated: its config names no attention heads. Leave --memory "
            f"out; texts are then read in one pass."
        )
    whole = pass_bytes(subject, tokens) + HEAD_BYTES
    if whole <= budget:
        return None
    piece = LEAST
    least = pass_bytes(subject, tokens, cached=piece) + HEAD_BYTES
    if least > budget:
        raise InvalidParameterError(
            f"A text of {tokens:,} tokens takes about {whole / 2**30:.3g} GiB in one pass and {least / 2**30:.3g} GiB "
            f"in cached pieces of {LEAST} tokens; found --memory {budget / 2**30:.3g}GiB. Allow more, or read less."
        )
    while 2 * piece < tokens and pass_bytes(subject, tokens, cached=2 * piece) + HEAD_BYTES <= budget:
        piece *= 2
    return piece


# Called with the name of the current job and the cost done since the last call, in the units of `pass_cost`.
Progress = Callable[[str, float], None]
# A greedy answer, whatever a checkpoint's generation_config says.
GREEDY: dict[str, Any] = {"use_cache": True, "cache_implementation": None}
GREEDY |= {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False, "do_sample": False}
# What older transformers do not know, they would hand to the model.
GREEDY |= dict.fromkeys(
    {
        *("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "penalty_alpha", "dola_layers"),
        *("constraints", "force_words_ids", "token_healing", "output_attentions", "output_hidden_states"),
    }
    & vars(GenerationConfig()).keys()
)
# Tokens at which attention costs as much as all the rest, for the 135M checkpoint of the demo.
SMALL_MODEL = 4096


def pass_cost(tokens: int, turning_point: int = SMALL_MODEL) -> float:
    """Rough cost of one forward pass, for a progress bar only: linear layers plus quadratic attention.

    Attention costs as much as all the rest at ``turning_point`` tokens.
    """
    return tokens * (1 + tokens / turning_point)


def turning_point(subject: Subject) -> int:
    """Tokens at which a model's attention costs as much as all the rest of it.

    By operations: 2 per weight and token against 2 per layer, channel and visible key, half of the keys being visible
    on average; halved again because attention reaches about half the speed of matrix products.
    """
    base, config = subject.model, subject.text
    embedding = base.get_input_embeddings().weight
    tied = bool(getattr(config, "tie_word_embeddings", False))
    weights = sum(parameter.numel() for parameter in base.parameters()) - (0 if tied else embedding.numel())
    return max(1, int(weights) // int(2 * config.num_hidden_layers * embedding.shape[-1]))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model in their order; the model beneath its head where no list of layers is found."""
    subject = Subject.of(model)
    base, depth, towers = subject.model, subject.text.num_hidden_layers, towers_of(subject.model)
    stacks = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    of_text = [stack for stack in stacks if stack not in towers] or stacks
    return list(of_text[0]) if of_text else [base.base_model]


@contextlib.contextmanager
def ticking(
    model: nn.Module, name: str, cost: float, progress: Progress, *, passes: int | None = None
) -> Iterator[None]:
    """Report progress after every layer: one pass over a long text takes too long for a bar that stands still.

    Args:
        progress: Function that is called once with cost 0 at the start, then after every layer.
        passes: Number of passes that are reported, the first ones; None for all.
    """
    ticks = layers_of(model)
    progress(name, 0.0)
    left = itertools.repeat(cost / len(ticks), *([] if passes is None else [passes * len(ticks)]))
    hooks = [tick.register_forward_hook(lambda *_: progress(name, next(left, 0.0))) for tick in ticks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_reach(subject: Subject, length: int) -> None:
    """Raise ``InvalidParameterError`` if ``length`` tokens are more than the model is meant for.

    A dynamic extension follows the length of the text, so that no length is beyond it.
    """
    meant = describe(subject.model)
    if follows_length(subject) or meant.target_length is None or length <= meant.target_length:
        return
    state = "is trained for" if meant.method is None else f"was extended to, by {meant.method['method']}"
    raise InvalidParameterError(
        f"{length:,} tokens are more than the {meant.target_length:,} that this model {state}. Ask for fewer, or "
        f"extend it further."
    )
