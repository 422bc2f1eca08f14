"""Answer questions about a text that the model reads once."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import CompileConfig, LogitsProcessor, TextIteratorStreamer

from ctxext.caches.guards import guards_of
from ctxext.caches.prefix import (
    Mark,
    common,
    depends_on,
    new_cache,
    read_prefix,
    require_graph,
    require_prefix,
    shorten,
    virtual_tokens,
    write_prefix,
)
from ctxext.caches.records import cache_argument
from ctxext.core.patching import describe, patch
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError
from ctxext.files import refuse_as_file
from ctxext.measuring.forward import (
    GREEDY,
    check_known,
    follows_unextended,
    forget_longest,
    goes_on,
    require_evaluation,
    without_images,
)
from ctxext.methods.parameters import checked_tokens
from ctxext.mistakes import text_tokenizer
from ctxext.recommended import RECOMMENDED
from ctxext.serving.selected import select as selected
from ctxext.serving.selected import tokens_in
from ctxext.texts.conversations import content_for, normalised
from ctxext.texts.documents import texts_in

ANSWER, QUESTION = 256, 256  # tokens of an answer, and those kept free for a question that is not known yet
LINE_END = "\n"
# Tokens of a text read at a time. On a CPU 512 took 8 % longer, 256 17 %, and 2,048 as long (135M, 9,000 tokens).
CHUNK = 1024
UNSURE = 0.7
"""Mean probability of a token below which an answer is called unsure, chosen by ``scripts/studies/unsure.py``."""
MOST = 4  # times the trained length that a text extends a model by itself: further was not measured


def as_graphs() -> dict[str, Any]:
    """Return the settings of a generation by which the steps over a cache of a fixed size run as graphs."""
    how = CompileConfig()
    how._compile_all_devices = True
    return {"compile_config": how}


def prompt_of(tokenizer: Any, text: str, question: str, *, completes: bool = False) -> list[int]:
    """Return the tokens of a prompt: the text, then the question, in the chat template where there is one.

    Args:
        completes: True if ``question`` is the beginning of a line to complete, without a template.
    """
    if completes:
        return list(tokenizer(f"{text}\n{question}")["input_ids"])
    if tokenizer.chat_template is None:
        return list(tokenizer(f"{text}\n\nQuestion: {question}\nAnswer:")["input_ids"])
    content = content_for(tokenizer)(f"{text}\n\nAnswer from the text above: {question}")
    said = [{"role": "user", "content": content}]
    try:
        return list(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False))
    except (TemplateError, ValueError) as error:
        raise InvalidParameterError(
            f"The chat template of this tokenizer does not take a question: {error} Set tokenizer.chat_template to "
            f"None, or complete a line (--complete)."
        ) from error


class Certainty(LogitsProcessor):  # type: ignore[misc]
    """The probabilities of the tokens that greedy decoding takes; the last processor, which changes nothing."""

    def __init__(self) -> None:
        self.probabilities: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.probabilities.append(scores[0].float().softmax(-1).amax())
        return scores

    def mean(self, tokens: int) -> float:
        """Return the mean probability of the first ``tokens`` tokens; a generation may have drawn one more."""
        return float(torch.stack(self.probabilities[:tokens]).mean())


@dataclass
class ReadText:
    """A text that comes before each question, and the model's cache of it.

    A plain model whose positions follow the length of its input (rope types dynamic and longrope) has none, nor has one
    with an adapter of virtual tokens: it reads text and question together, each time.

    Args:
        questions: Questions that are known already; others may follow.
        new: Tokens of an answer, at most, above 0.
        completes: True for questions that are beginnings of a line, which the answers complete.
        keep: File of what was read: it is gone on from where it begins alike, and written.
        compiles: True to run the steps of an answer as graphs, over a cache with room for all tokens.

    Attributes:
        probability: mean probability of a token of the newest answer; ``is_unsure`` below ``UNSURE``.
    """

    model: Any
    tokenizer: Any
    text: str
    questions: Sequence[str] = ()
    new: int = ANSWER
    completes: bool = False
    keep: Path | None = None
    compiles: bool = False
    _mark: Mark | None = field(default=None, init=False)
    _cached: list[int] = field(default_factory=list, init=False)
    _read_with: dict[str, Any] = field(default_factory=dict, init=False)
    _room: int | None = field(default=None, init=False)
    probability: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        checked_tokens("max_new_tokens", self.new)

    @property
    def is_unsure(self) -> bool:
        """True if the newest answer is too improbable to be relied on."""
        return self.probability < UNSURE

    @property
    def subject(self) -> Subject:
        """The model inside its wrappers."""
        return Subject.of(self.model)

    @property
    def is_whole(self) -> bool:
        """True if no part of a prompt is read alone: its length sets positions, or an adapter puts tokens in front."""
        return follows_unextended(self.subject) or virtual_tokens(self.subject) is not None

    @property
    def window(self) -> int:
        """Tokens that the model reads as intended; the largest number where its config does not say."""
        description = describe(self.model)
        return description.target_length or description.trained_length or sys.maxsize

    @property
    def needed(self) -> int:
        """Tokens of the text, the longest question and an answer."""
        longest = max((len(self._prompt(one)) for one in self.questions), default=0)
        return (longest or len(self.shared) + QUESTION) + self.new

    @property
    def shared(self) -> list[int]:
        """Tokens that begin the prompt of every question."""
        first, second = (self._prompt(question) for question in ("a", "1"))
        return first[: common(first, second)][:-2]  # those at the end may join a question's

    def extend(self, sliding_window: str | None = None) -> None:
        """Extend a plain model as far as the text needs, by the method that is recommended without training.

        ``sliding_window`` is as for ``ctxext.patch``.

        Raises:
            IncompatibleError: no such method applies to the model.
        """
        if self.needed <= self.window or describe(self.model).method is not None:
            return
        methods = [recommended.methods[0] for recommended in RECOMMENDED if not recommended.trains]
        for method in methods:
            try:
                factor = min(MOST, math.ceil(self.needed / self.window))
                patch(self.model, method, factor=factor, sliding_window=sliding_window)
                return
            except IncompatibleError:
                if method == methods[-1]:
                    raise

    def cut(self) -> int:
        """Leave out the beginning of a text that exceeds the window; return the number of tokens left out.

        Raises:
            InvalidParameterError: nothing of the text would be left, or the tokenizer is written in Python.
        """
        left_out = 0
        while (over := self.needed - self.window) > 0:  # tokens at a cut may join otherwise
            _, starts = tokens_in(self.tokenizer, self.text, f"Cut the text to {self.window:,} tokens yourself.")
            start = next((first for first in starts[over:] if first > 0), None)  # several may make up a character
            if start is None:
                raise InvalidParameterError(f"The window of {self.window:,} tokens leaves no room for a text.")
            self.text = self.text[start:]
            left_out += over
        return left_out

    def read(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Fill the cache with the text; ``progress`` is called with the number of tokens of each chunk.

        Raises:
            InvalidParameterError: text, question and answer exceed the window.
            IncompatibleError: the model keeps its state otherwise than in the cache that it is given.
            CheckpointError: the file ``keep`` is of another model, or damaged.
        """
        if self.keep is not None:
            self._require_file(self.keep)
        if self.compiles:
            require_graph(self.subject)
            self._room = max(self._room or 0, self.needed)
        self._require_room(self.needed)
        self._require_cache()

        def advance(_: nn.Module, given: Any, arguments: Any, __: Any) -> None:
            progress(int((arguments["input_ids"] if "input_ids" in arguments else given[0]).shape[1]))

        self._cached, cache, known = [] if self.is_whole else self.shared, self._empty(), 0
        if self.keep is not None and self.keep.exists():
            kept, tokens = read_prefix(self.keep, self.subject)
            length = common(tokens, self._cached)
            if shorten(kept, length):
                cache, known = kept, length
                progress(known)
        hook = self.model.register_forward_hook(advance, with_kwargs=True)
        try:
            if known < len(self._cached):
                self._write(self._cached, cache, 1)  # one token, which is not cached
        finally:
            hook.remove()
        if self.keep is not None and known < len(self._cached):
            write_prefix(self.keep, self.subject, cache, self._cached)
        self._read_with = depends_on(self.subject)
        self._mark = Mark(cache, by_length=any(guard.by_length for guard in guards_of(self.subject.model)))

    def save(self, path: str | Path) -> None:
        """Write what was read to a file, from which ``ctxext.read(..., keep=path)`` goes on in another process.

        Raises:
            IncompatibleError: the model's cache does not serve longer texts that begin alike.
            CheckpointError: no file can be written there.
        """
        self._require_file(Path(path))
        write_prefix(Path(path), self.subject, self._read_cache(), self._cached)

    def ask(self, question: str, streamer: Any = None) -> str:
        """Return the greedy answer to a question, as ``model.generate`` gives it for the whole prompt.

        Raises:
            InvalidParameterError: text, question and answer exceed the window.
        """
        prompt = self._prompt(question)
        needed = len(prompt) + self.new
        self._require_room(needed)
        if self._mark is None:
            self.questions = self.questions or [question]
        if self._room is not None and needed > self._room:
            self._mark, self._room = None, needed
        cache = self._read_cache()
        holds = prompt[: len(self._cached)] == self._cached
        written = self._write(prompt, cache if holds else self._empty(), self.new, streamer)
        return str(self.tokenizer.decode(written, skip_special_tokens=True)).strip()

    def _read_cache(self) -> Any:
        """Return the cache of the text alone, which is read if it has to be: weights or adapters may have changed."""
        if self._mark is None or self._read_with != depends_on(self.subject) or not self._mark.back():
            self.read()
        assert self._mark is not None
        return self._mark.cache

    def stream(self, question: str) -> Iterator[str]:
        """Yield the answer to a question piece by piece, while it is written."""
        pieces: Any = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with ThreadPoolExecutor(1) as pool:  # a stream that is left is written to its end, before another question
            answer = pool.submit(self.ask, question, pieces)
            answer.add_done_callback(lambda _: pieces.end())
            yield from filter(None, pieces)
            answer.result()

    def _require_cache(self) -> None:
        """Refuse a model that does not go on from a cache as from the tokens in it: recurrent ones may not."""
        if not goes_on(self.subject):
            raise IncompatibleError(
                f"{type(self.model).__name__} keeps what it has read in a form of its own, so that its text cannot be "
                f"read once for all questions. Ask with model.generate on text and question together."
            )

    def _require_file(self, path: Path) -> None:
        """Refuse a file for what was read if none can be written there, or if no text may go on from it."""
        if self.compiles:
            raise InvalidParameterError("A file keeps a cache that grows, and graphs need a fixed one. Leave one out.")
        refuse_as_file(path)
        require_prefix(self.subject)

    def _require_room(self, tokens: int) -> None:
        if tokens > self.window:
            raise InvalidParameterError(
                f"Text, question and answer take {tokens:,} tokens, and the model's window has {self.window:,}. "
                f"Raise the factor, or cut the text."
            )

    def _prompt(self, question: str) -> list[int]:
        return prompt_of(self.tokenizer, self.text, question, completes=self.completes)

    @torch.inference_mode(False)
    def _empty(self) -> Any:
        return new_cache(self.subject.model, self._room)

    @torch.inference_mode(False)  # a cache of a fixed size is written to later, perhaps outside of that mode
    def _write(self, prompt: list[int], cache: Any, new: int, streamer: Any = None) -> list[int]:
        """Return the tokens that the model writes after a prompt, whose beginning the cache may hold."""
        require_evaluation(self.subject.model)
        graphs, cached = self.compiles and new > 1, int(cache.get_seq_length())
        if graphs and len(prompt) - cached > CHUNK:
            self._write(prompt[:-1], cache, 1)  # in chunks, which run outside of graphs
        elif cached:  # older transformers would read all of it again in chunks
            for end in range(cached + CHUNK, len(prompt), CHUNK):
                self._write(prompt[:end], cache, 1)
        tokens = torch.tensor([prompt], device=self.model.device)
        check_known(self.model, tokens)
        forget_longest(self.subject)
        certainty = Certainty()
        given = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "streamer": streamer,
            "tokenizer": self.tokenizer,  # by which a checkpoint's own stop strings are found
            "logits_processor": [certainty],
        }
        given |= {} if self.is_whole else {cache_argument(self.model) or "past_key_values": cache}
        given |= {"stop_strings": [LINE_END]} if self.completes else {}
        given |= as_graphs() if graphs else {"disable_compile": True}
        given |= {} if graphs or cached or self.is_whole else {"prefill_chunk_size": CHUNK}
        with without_images(self.model):
            written = self.model.generate(**given, **GREEDY, max_new_tokens=new)
        answer: list[int] = written[0, len(prompt) :].tolist()
        self.probability = certainty.mean(len(answer))
        if math.isnan(self.probability):  # greedy decoding takes the first token for the likeliest then
            raise IncompatibleError(
                f"{type(self.model).__name__} gives NaN instead of probabilities. Load it in another dtype (--dtype): "
                f"fp32 has the range."
            )
        return answer


def ask(
    model: Any,
    tokenizer: Any,
    texts: str | Iterable[str],
    questions: str | Iterable[str],
    *,
    max_new_tokens: int = ANSWER,
    select: int | None = None,
) -> list[str]:
    """Answer questions about texts, which the model reads once.

    The texts come before each question, inside the tokenizer's chat template where it has one. Extend the model
    first (``ctxext.patch``) where they are longer than its trained length.

    Args:
        model: Causal language model in eval mode, extended or not; or a pipeline or another wrapper around one.
        tokenizer: The model's tokenizer, or a processor with one.
        texts: One text, or several, which are read in this order with an empty line between them.
        questions: One question, or several, each answered by itself.
        max_new_tokens: Tokens of an answer, at most, above 0.
        select: Tokens of the texts to read for each question, at most: their beginning, and the chunks that share most
            with the question; at least 256. None reads all, once for all questions.

    Returns:
        The greedy answer to each question, as ``model.generate`` gives it for the whole prompt.

    Raises:
        InvalidParameterError: text, question and answer exceed the model's window; or too few tokens to write or read;
            or the name of a file instead of its text.
        IncompatibleError: the model keeps its state otherwise than in the cache that it is given, does not go on from
            a prompt, is in training mode, or gives NaN.
    """
    model, tokenizer, questions = _generating(model), _words_of(tokenizer), texts_in("questions", questions)
    if select is not None:
        pairs = zip(selected(tokenizer, _joined(texts), questions, select), questions, strict=True)
        return [ReadText(model, tokenizer, part.text, [one], max_new_tokens).ask(one) for part, one in pairs]
    text = ReadText(model, tokenizer, _joined(texts), questions, max_new_tokens)
    return [text.ask(question) for question in questions]


def read(
    model: Any,
    tokenizer: Any,
    texts: str | Iterable[str],
    *,
    keep: str | Path | None = None,
    compiles: bool = False,
    max_new_tokens: int = ANSWER,
) -> ReadText:
    """Read texts once, for questions that come later.

    In another process ``ctxext.read(model, tokenizer, novel, keep="novel.safetensors")`` reads nothing again that the
    file holds.

    Args:
        model: Causal language model, as for ``ctxext.ask``.
        tokenizer: The model's tokenizer, or a processor with one.
        texts: One text, or several, as for ``ctxext.ask``.
        keep: File of what was read: reading goes on from it where it begins alike, and writes it otherwise.
        compiles: True to run the steps of an answer as graphs, over a cache with room for all tokens, which no file
            keeps. It pays on a GPU; the first answer waits until the graph is compiled.
        max_new_tokens: Tokens of an answer, at most, above 0.

    Returns:
        The text, with ``ask(question)`` and ``stream(question)`` for answers, and ``save(path)``.

    Raises:
        InvalidParameterError: text, question and answer exceed the model's window.
        IncompatibleError: the model keeps its state otherwise than in the cache that it is given.
        CheckpointError: the file ``keep`` is of another model, extension or dtype, or damaged.
    """
    place = None if keep is None else Path(keep)
    model, tokenizer = _generating(model), _words_of(tokenizer)
    text = ReadText(model, tokenizer, _joined(texts), new=max_new_tokens, keep=place, compiles=compiles)
    text.read()
    return text


def _generating(given: Any) -> Any:
    """Return the outermost of a model and its wrappers that generates, as pipelines and data parallelism do not.

    Raises:
        IncompatibleError: no model there goes on from a prompt.
    """
    subject = Subject.of(given)
    if subject.config.is_encoder_decoder or not subject.model.can_generate():
        raise IncompatibleError(
            f"{type(subject.model).__name__} does not go on from a text that it reads, as an answer does. Give a "
            f"causal language model."
        )
    return next(part for part in subject.chain if isinstance(part, nn.Module) and hasattr(part, "generate"))


def _words_of(given: Any) -> Any:
    """Return a tokenizer, or the one of a processor, with the chat template that the processor alone may have."""
    tokenizer, template = text_tokenizer(given), getattr(given, "chat_template", None)
    if tokenizer.chat_template is None and template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def _joined(texts: str | Iterable[str]) -> str:
    return "\n\n".join(map(normalised, texts_in("texts", texts)))  # as in a file
