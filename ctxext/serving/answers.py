"""Generation of answers: token by token, drawn as a request asks, up to where the text ends.

A ``Draw`` is one answer. In turn or in continuous batches, it is called with the logits of its next token: a request
means the same in both, whichever other requests run.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from starlette.exceptions import HTTPException
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from ctxext.caches.records import cache_argument
from ctxext.core.rebuild import FAILURES
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, require_package
from ctxext.files import JsonObject
from ctxext.measuring.forward import GREEDY, forget_longest, logits_in_chunks
from ctxext.serving.ask import as_graphs
from ctxext.serving.prefixes import GraphPrefixes, Prefixes
from ctxext.serving.requests import Completion, Sampling, refusal

DRAWN = GREEDY | {"repetition_penalty": 1.0}  # settings of a generation whose tokens a Draw takes
COLDEST = 0.01  # temperature below which the likeliest token is taken: logits divided by less may overflow
BEFORE = 8  # last tokens of a prompt, behind which an answer is read: some tokenizers begin a text without its space
FORCED = "response_format, text.format and a forced tool_choice"  # fields that force a form on an answer
LOG = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Told:
    """A token of a prompt or an answer, as a client is told about it.

    Args:
        start: characters of the text before it.
        logprob: its log-probability; None for the first token of a prompt.
        tops: texts and log-probabilities of the likeliest tokens.
        hidden: True for a token that the text of the answer leaves out.
    """

    text: str
    start: int
    logprob: float | None
    tops: list[tuple[str, float]]
    hidden: bool = False


@dataclass
class AnswerPiece:
    """A piece of an answer: what one more token adds, or all of it.

    Args:
        finish: Reason for which the answer ends; None for a piece that is not the last.
        reasoning: Thoughts before the text.
    """

    text: str = ""
    told: list[Told] = field(default_factory=list)
    finish: str | None = None
    reasoning: str = ""
    calls: list[JsonObject] = field(default_factory=list)

    def __add__(self, more: AnswerPiece) -> AnswerPiece:
        said, told, thought = self.text + more.text, self.told + more.told, self.reasoning + more.reasoning
        return AnswerPiece(said, told, more.finish, thought, self.calls + more.calls)


NumberedPieces = AsyncIterator[tuple[int, AnswerPiece]]
"""Pieces of several answers, each with the number of its answer."""


class TokenText:
    """Text of tokens, as a tokenizer writes it.

    Args:
        vocabulary: Number of tokens that the model knows.
        ends: Tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self.tokenizer, self.vocabulary, self.ends = tokenizer, vocabulary, ends
        self.special = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.guide: Any = None
        if find_spec("llguidance"):  # now: while it reads the vocabulary, it lets no other thread run
            from llguidance.hf import from_tokenizer

            with contextlib.suppress(ValueError):  # grammars are refused then
                self.guide = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends) or None)

    def behind(self, before: int | None, token: int) -> str:
        """Return the text of a token behind another."""
        head = "" if before is None else self.tokenizer.decode([before])
        both = self.tokenizer.decode([token] if before is None else [before, token])
        return str(both[len(head) :] if both.startswith(head) else self.tokenizer.decode([token]))

    def told(self, logits: Tensor, before: int | None, token: int, written: AnswerText, tops: int) -> Told:
        """Return the record of the last token of a text, which was drawn from these logits."""
        logprobs = logits.float().log_softmax(-1)
        likeliest = logprobs.topk(min(tops, logprobs.shape[-1])).indices.tolist()
        named = [(self.behind(before, other), float(logprobs[other])) for other in likeliest]
        text, start = self.behind(before, token), written.start
        if text and written.text.endswith(text, start):  # behind half a letter, which nothing completes
            start = len(written.text) - len(text)
        return Told(text, start, float(logprobs[token]), named, token in self.special)

    def grammar(self, schema: JsonObject) -> Grammar:
        """Return the grammar of JSON that keeps a schema, or refuse."""
        require_package("llguidance", "json", f"{FORCED} need")
        from llguidance import LLMatcher

        if self.guide is None:
            raise refusal(f"{FORCED} are impossible with this tokenizer.")
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        except ValueError as error:
            raise refusal(f"{FORCED} are impossible with this schema: {error}.") from error
        return Grammar(LLMatcher(self.guide, grammar, log_level=0), bool(self.ends))


class Grammar:
    """JSON that an answer has to be.

    Args:
        ends: True if the model has a token that ends a text.
    """

    def __init__(self, matcher: Any, ends: bool) -> None:
        self.matcher, self.ends = matcher, ends
        self._require()

    def copy(self) -> Grammar:
        """Return a grammar for one answer."""
        return Grammar(self.matcher.deep_copy(), self.ends)

    def _require(self) -> None:
        """Refuse a schema that leaves too many ways to write its JSON: a matcher in error would allow no token."""
        if fault := self.matcher.get_error():
            raise InvalidParameterError(f"{FORCED}: the JSON schema cannot be kept: {fault.splitlines()[0]}.")

    def allowed(self, logits: Tensor) -> Tensor:
        """Return the logits with the tokens left out that the JSON cannot go on with."""
        kept = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)[: logits.shape[-1]] > 0
        return torch.where(kept.to(logits.device), logits[: len(kept)], -math.inf)

    def take(self, token: int) -> bool:
        """Go on by a token; return whether the JSON is complete."""
        self.matcher.consume_token(token)
        self._require()
        return bool(self.matcher.is_stopped() or (not self.ends and self.matcher.is_accepting()))


class AnswerText:
    """Text of an answer while it grows: it ends before the first stop sequence.

    Args:
        names: names of special tokens that are given out with it, though no stop sequence is found in them.
        before: tokens of the text that it goes on with.
        least: tokens before which no stop sequence is looked for.
    """

    def __init__(
        self, reader: TokenText, stops: Sequence[str], names: dict[int, str], before: Sequence[int] = (), least: int = 0
    ) -> None:
        self.reader, self.stops, self.shown, self.least = reader, stops, names, least
        self.stream = self._behind([] if self._decoded(before).endswith("\ufffd") else before)
        self.text, self.given, self.cut, self.count = "", 0, False, 0
        self.names: list[tuple[int, str]] = []
        self.waiting: list[int] = []  # tokens since the text grew last

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.reader.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True))

    def _behind(self, tokens: Sequence[int]) -> DecodeStream:
        return DecodeStream([*tokens], skip_special_tokens=True)

    def add(self, token: int) -> None:
        """Add the text of a token."""
        self.start = len(self.text)
        self.count += 1
        self.waiting.append(token)
        if token in self.shown:
            self.names.append((len(self.text), self.shown[token]))
        try:
            more = self.stream.step(self.reader.tokenizer.backend_tokenizer, token) or ""
        except BaseException as error:
            if type(error) is not Exception:  # tokenizers knows no other class
                raise
            # An invalid byte changes how bytes before it are read, which were given out.
            more, self.stream = self._decoded(self.waiting), self._behind(self.waiting)
        if more:
            self.waiting = []
        self._grow(more)

    def end(self) -> None:
        """Add what the tokens leave over, such as half a letter."""
        if not self.cut:
            self._grow(self._decoded(self.waiting))

    def _grow(self, more: str) -> None:
        before = len(self.text) + 1
        self.text += more
        stops = self.stops if self.count >= self.least else ()
        found = [at for stop in stops if (at := self.text.find(stop, max(0, before - len(stop)))) >= 0]
        if found:
            self.text, self.cut = self.text[: min(found)], True

    def _held(self, stop: str) -> int:
        """Return the place in the text from which on it may be the beginning of a stop sequence."""
        places = range(max(0, len(self.text) + 1 - len(stop)), len(self.text))
        return next((at for at in places if stop.startswith(self.text[at:])), len(self.text))

    def release(self, ended: bool) -> str:
        """Give out the text that no stop sequence can take back."""
        safe = len(self.text)
        if not ended:  # it may end with the beginning of one
            safe = min((self._held(stop) for stop in self.stops), default=safe)
        parts = []
        while self.names and self.names[0][0] <= safe:
            at, name = self.names.pop(0)
            parts += [self.text[self.given : at], name]
            self.given = at
        parts.append(self.text[self.given : safe])
        self.given = safe
        return "".join(parts)


class Draw:
    """One answer while it is generated.

    Args:
        asked: Request. The checkpoint's settings decide what the request does not say about sampling.
        tops: likeliest tokens whose log-probabilities are told; None tells none.
        number: place among the answers to one prompt, which have different seeds.
    """

    def __init__(
        self,
        prompt: list[int],
        asked: Sampling,
        usual: GenerationConfig,
        limit: int,
        tops: int | None,
        reader: TokenText,
        *,
        number: int = 0,
        names: dict[int, str] | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        sampled = usual if usual.do_sample else GenerationConfig()

        # Where a checkpoint decodes greedily, its temperature, top_k and top_p mean nothing, but its penalty holds.
        def chosen(name: str, neutral: Any) -> Any:
            of_checkpoint = getattr(usual if name == "repetition_penalty" else sampled, name)
            given = getattr(asked, name)
            return given if given is not None else of_checkpoint if of_checkpoint is not None else neutral

        self.id, self.number = uuid.uuid4().hex, number
        self.prompt, self.limit, self.tops, self.reader = prompt, limit, tops, reader
        self.grammar = grammar and grammar.copy()
        self.ends = reader.ends | frozenset(asked.stop_token_ids or ())
        self.least = asked.min_tokens or 0
        self.bias = asked.bias
        self.frequency, self.presence = asked.frequency_penalty or 0.0, asked.presence_penalty or 0.0
        self.repetition, temperature = chosen("repetition_penalty", 1.0), chosen("temperature", float(sampled is usual))
        self.temperature = temperature if temperature >= COLDEST else 0.0
        top_k, top_p, min_p = chosen("top_k", 0), chosen("top_p", 1.0), chosen("min_p", 0.0)
        self.narrowed = [TopKLogitsWarper(top_k)] if top_k > 0 else []
        self.narrowed += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        self.narrowed += [MinPLogitsWarper(min_p)] if min_p > 0 else []
        self.cached, self.owner = 0, (asked.cache_salt, asked.prompt_cache_key)
        self.seed = None if asked.seed is None else asked.seed + number
        self.chance: torch.Generator | None = None
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        before = prompt[-BEFORE:] if isinstance(asked, Completion) else ()
        self.written = AnswerText(reader, stops, names or {}, before, self.least)
        self.tokens: list[int] = []
        self.told: list[Told] = []
        self.finish: str | None = None
        self.gone = False
        self.emit: Callable[[AnswerPiece | BaseException], Any] = print

    @property
    def is_owned(self) -> bool:
        """True if only requests with the same salt or key may go on from what this one reads."""
        return self.owner != (None, None)

    def __call__(self, scores: Tensor) -> int:
        """Draw the next token from its logits."""
        if scores.isnan().any():  # greedy decoding takes NaN for the likeliest
            raise IncompatibleError("The model gives NaN. Serve it in another --dtype: fp32 has the range.")
        logits = self._weighed(scores.float())
        if self.temperature == 0:
            token = int(logits.argmax())
        else:
            logits = (logits / self.temperature)[None]
            for warper in self.narrowed:
                logits = warper(None, logits)
            if self.chance is None:
                self.chance = torch.Generator(logits.device)
                self.chance.seed() if self.seed is None else self.chance.manual_seed(self.seed)
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=self.chance))
        self._take(token, scores)
        return token

    def _weighed(self, logits: Tensor) -> Tensor:
        """Return the logits with all that a request adds to them."""
        if self.repetition != 1:
            text = torch.tensor([self.prompt + self.tokens], device=logits.device)
            logits = RepetitionPenaltyLogitsProcessor(self.repetition)(text, logits[None].clone())[0]
        added = Counter(self.bias)
        for token, times in Counter(self.tokens).items() if self.frequency or self.presence else ():
            added[token] -= times * self.frequency + self.presence  # type: ignore[assignment]
        for token in self.ends if len(self.tokens) < self.least else ():
            added[token] = -math.inf  # type: ignore[assignment]
        if added:
            places = torch.tensor(list(added), device=logits.device)
            summands = torch.tensor(list(added.values()), device=logits.device, dtype=logits.dtype)
            logits = logits.index_add(0, places, summands)
        return logits if self.grammar is None else self.grammar.allowed(logits)

    def _take(self, token: int, scores: Tensor) -> None:
        """Record a token, decide whether it is the last, and emit the text that no later token can change."""
        written = self.written
        written.add(token)
        if self.tops is not None:
            before = (self.tokens or self.prompt)[-1]
            self.told.append(self.reader.told(scores, before, token, written, self.tops))
        self.tokens.append(token)
        complete = self.grammar is not None and self.grammar.take(token)
        if written.cut or token in self.ends or complete:
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
        self.emit(self._piece())

    def _piece(self) -> AnswerPiece:
        written, has_ended = self.written, self.finish is not None
        if has_ended:
            written.end()
        text = written.release(has_ended)
        whole = has_ended and not written.cut
        told = [told for told in self.told if whole or told.start < written.given]
        self.told = self.told[len(told) :]
        return AnswerPiece(text, told, self.finish)

    def end(self, error: BaseException | None) -> None:
        """End an answer that no last token has ended."""
        if self.finish is None:
            self.finish = "stop" if self.limit else "length"
            self.emit(self._piece() if error is None else error)


class OneByOne(GenerateManager):  # type: ignore[misc]
    """Manager of requests that are answered in turn; one whose client went away ends at the next token."""

    room = None  # tokens of a request that it can hold; None for any number

    def __init__(self, model: Any, prefixes: Prefixes) -> None:
        super().__init__()
        self.model, self.prefixes = model, prefixes
        self.running: set[Draw] = set()

    def begin(self, draw: Draw) -> None:
        """Answer when those before are answered."""
        self.submit(self._answer, draw).add_done_callback(lambda done: draw.end(done.exception()))

    def leave(self, draw: Draw) -> None:
        """End the work for an answer that nobody waits for."""
        draw.gone = True

    def _answer(self, draw: Draw) -> None:
        if draw.gone or not draw.limit:
            return

        def chosen(ids: Tensor, scores: Tensor) -> Tensor:
            # On some devices transformers takes a step more than there are tokens, and undoes it.
            return _only(draw(scores[0]) if draw.finish is None else 0, scores)

        def stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((1,), draw.gone or draw.finish is not None, device=ids.device)

        ids, more = torch.tensor([draw.prompt], device=self.model.device), dict[str, Any]()
        graphs = isinstance(self.prefixes, GraphPrefixes)  # these need their one cache even where no prompt is kept
        if graphs or self.prefixes.why_not is None:
            cache, draw.cached = self.prefixes.take(draw.prompt, draw.owner)
            more[cache_argument(self.model) or "past_key_values"] = cache
        forget_longest(Subject.of(self.model))
        how = as_graphs() if graphs else {}
        self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **DRAWN,
            **more,
            **how,
            max_new_tokens=draw.limit,
            tokenizer=draw.reader.tokenizer,
            logits_processor=[chosen],
            stopping_criteria=[stopped],
        )
        for cache in more.values():
            self.prefixes.put(draw.prompt + draw.tokens, cache, draw.owner)

    async def read(self, prompt: list[int], reader: TokenText, tops: int) -> list[Told]:
        """Return the records of the tokens of a prompt."""
        # Shielded: transformers writes the result into a future that a client who left would have cancelled.
        told: list[Told] = await asyncio.shield(self.async_submit(self._read, prompt, reader, tops))
        return told

    @torch.no_grad()
    def _read(self, prompt: list[int], reader: TokenText, tops: int) -> list[Told]:
        told = [Told(reader.behind(None, prompt[0]), 0, None, [])]
        written = AnswerText(reader, [], {})
        written.add(prompt[0])
        ids = torch.tensor([prompt[:-1]], device=self.model.device)
        for first, logits in logits_in_chunks(self.model, ids) if len(prompt) > 1 else ():
            for at, row in enumerate(logits[0], first):
                written.add(prompt[at + 1])
                told.append(reader.told(row, prompt[at], prompt[at + 1], written, tops))
        return told


class Rows(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Draws the tokens of all answers of a batch, each from its row of logits."""

    def __init__(self, usual: ContinuousBatchingLogitsProcessorList) -> None:
        self.__dict__.update(vars(usual))
        self.do_processing = True
        self.draws: dict[str, Draw] = {}
        self.states: list[Any] = []

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """Note whose tokens come next, as transformers prepares them."""
        self.states = [request.state for request in requests_in_batch if request.has_new_token]
        return super().prepare_tensor_args(requests_in_batch, arg_storage)  # type: ignore[no-any-return]

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        """Return logits that are finite for the drawn tokens only."""
        scores = super().__call__(input_ids, scores, logits_processor_args)
        rows = []
        for state, row in zip(self.states, scores, strict=False):
            draw, token = self.draws.get(state.request_id), 0
            if draw is not None:
                try:
                    token = draw(row)
                except (HTTPException, *FAILURES) as error:  # it would end the worker, and all other answers
                    draw.end(error)
            rows.append(_only(token, row[None]))
            if draw is None or draw.finish is not None:  # this token is the last
                state._new_tokens_limit = state.generated_len() + 1
                self.draws.pop(state.request_id, None)
        return torch.cat([*rows, scores[len(rows) :]])


class Together(CBGenerateManager):  # type: ignore[misc]
    """Manager of requests that are answered in continuous batches.

    Args:
        tokens: Tokens of all requests whose keys and values are held; None for all that free memory holds.
    """

    def __init__(self, model: Any, tokens: int | None) -> None:
        config = ContinuousBatchingConfig()
        config.num_blocks = None if tokens is None else math.ceil(tokens / config.page_size)
        config.use_cuda_graph = config.use_async_batching = False  # tokens are drawn outside of graphs, one by one
        super().__init__(config)
        self.running: set[Draw] = set()
        settings = copy.deepcopy(model.generation_config)
        settings.update(**DRAWN, max_new_tokens=None)
        # Refuses a model that continuous batches would not be right for.
        self._cb = model.init_continuous_batching(generation_config=settings, continuous_batching_config=config)
        self.rows = self._cb.logit_processor = Rows(self._cb.logit_processor)
        self._cb.start()
        while self._cb.batch_processor is None and self.is_alive():
            time.sleep(0.01)
        if not self.is_alive():
            raise InvalidParameterError(
                f"Continuous batches do not start: {self._cb.background_thread_status.fatal_error}"
            )
        # A request that does not fit would end the worker, and with it all others.
        cache = self._cb.batch_processor.cache
        self.room = infer_max_single_request_tokens(cache)
        search, mark = cache.search_prefix_match, cache.mark_complete_blocks

        def shared(request: str, prompt: list[int]) -> int:
            """Go on from blocks of requests without an owner, and note how many tokens need not be read."""
            draw = self.rows.draws.get(request)
            if draw is None or draw.is_owned:
                return 0
            draw.cached = search(request, prompt)
            return draw.cached

        def marked(state: Any, blocks: Any) -> None:
            draw = self.rows.draws.get(state.request_id)
            if draw is not None and not draw.is_owned:
                mark(state, blocks)

        cache.search_prefix_match, cache.mark_complete_blocks = shared, marked

    def begin(self, draw: Draw) -> None:
        """Answer in the batches that come next."""
        if not draw.limit:
            return draw.end(None)
        self.rows.draws[draw.id] = draw
        self._cb.register_result_handler(draw.id, lambda result: self._failed(draw, result.error))
        added = self._cb.add_request(draw.prompt, request_id=draw.id, max_new_tokens=draw.limit, eos_token_id=-1)
        if added is None:
            raise HTTPException(503, "The worker of continuous batches has ended. Restart the server.")

    def _failed(self, draw: Draw, error: str | None) -> None:
        if error is not None:
            draw.end(RuntimeError(error))

    def leave(self, draw: Draw) -> None:
        """End the work for an answer that nobody waits for."""
        self._cb.cancel_request(draw.id)
        self._cb.output_router.result_handlers.pop(draw.id, None)
        self.rows.draws.pop(draw.id, None)


def _only(token: int, scores: Tensor) -> Tensor:
    """Return logits that are finite for one token only."""
    return torch.full_like(scores, -math.inf).index_fill(-1, torch.tensor([token], device=scores.device), 0.0)


async def pieces_of(engine: OneByOne | Together, draws: Sequence[Draw]) -> NumberedPieces:
    """Yield the pieces of several answers as they come, each with the number of its answer.

    Raises:
        HTTPException: 500 or 503, if the model fails.
    """
    queue: asyncio.Queue[tuple[int, AnswerPiece | BaseException]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    # The model runs in another thread, and an asyncio queue takes items in the thread of its loop only.
    def into(number: int) -> Callable[[Any], Any]:
        return lambda item: loop.call_soon_threadsafe(queue.put_nowait, (number, item))

    waited, began = set(range(len(draws))), time.perf_counter()
    engine.running |= {*draws}
    prompts = [len(draw.prompt) for draw in draws if draw.number == 0]
    what = "a prompt" if len(prompts) == 1 else f"{len(prompts):,} prompts"
    LOG.info("Reading %s of %s tokens; answers under way: %d.", what, f"{sum(prompts):,}", len(engine.running))
    try:
        for number, draw in enumerate(draws):
            draw.emit = into(number)
            engine.begin(draw)
        while waited:
            number, item = await queue.get()
            if began and isinstance(item, AnswerPiece):
                LOG.info("Read %s of %s tokens in %.1f s.", what, f"{sum(prompts):,}", time.perf_counter() - began)
                began = 0.0
            if isinstance(item, BaseException):
                if isinstance(item, InvalidParameterError):
                    raise refusal(str(item))
                LOG.error("An answer failed.", exc_info=item)
                raise HTTPException(500, f"{type(item).__name__}: {item}")
            if item.finish is not None:
                waited.remove(number)
            yield number, item
    finally:  # also when the client is gone: nobody waits for the other answers then
        engine.running -= {*draws}
        for number in waited:
            engine.leave(draws[number])
