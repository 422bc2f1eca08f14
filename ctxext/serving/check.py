"""Find out by its answers whether a running server computes an extension, and which window it accepts.

A server may take the flags or the config of an extension, and compute something else without a word. Its answers tell:
after a long prompt, the probabilities of the next token match the extended model, the plain one, or a model extended by
one of the usual mistakes. Each of these models is run here.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, UnknownHandler

import torch
from torch import Tensor, nn

from ctxext.core.patching import describe, patched, patched_state, unpatch
from ctxext.core.scaling import scaling_of
from ctxext.core.subject import Subject
from ctxext.errors import IncompatibleError, InvalidParameterError, VerificationError, printable, shown
from ctxext.files import JsonObject, parse_json
from ctxext.measuring.forward import Progress, follows_length, logits_in_chunks, ticking
from ctxext.methods import Method, RopeMethod
from ctxext.methods.formulas import plain_inv_freq
from ctxext.methods.longrope import LongRoPE
from ctxext.methods.remap import RemapMethod
from ctxext.rotary.sites import find_sites
from ctxext.spec import Frequencies, RopeSpec

TOP = 5  # log-probabilities of the next token that every server gives
ANSWER = 12  # tokens of an answer, where a server gives text alone
INSIDE, BEYOND = 2, 4  # prompts within the trained window, and longer ones
STEPS = 6  # halvings of the interval in which the window lies
BYTES, SECONDS = 4 << 20, 1800  # most that one answer may take
LARGE = 1e9  # no log-probability is as far from 0
USUAL_BASE = 10_000.0  # that a server falls back on
READINGS = 6  # of a model whose extension is a table: as it is extended, not extended, and by four mistakes
# A server is taken to compute a reading that is this close to its answers, in nats, if every other is twice as far.
NEAR, FLOOR = 0.3, 0.02
AS_SAID, PLAIN = "as extended", "not extended"
# Every answer is taken as it is: an error has a sentence, and a redirect would carry the key to another host.
OPENER = OpenerDirector()
for handler in (ProxyHandler, UnknownHandler, HTTPHandler, HTTPSHandler):
    OPENER.add_handler(handler())


@dataclass(frozen=True)
class Continuation:
    """Continuation of the first ``length`` tokens by a server: log-probabilities of the next one, or text."""

    length: int
    top: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServerCheck:
    """Result of asking a running server: the reading that it computes, and the window that it accepts.

    Args:
        compared: "log-probabilities" of the next token, or "text" where the server gives no others.
        computes: the reading of the model that its answers fit; None if they fit none, or several.
        right: True if that is the model as it was extended.
        beyond: distance of the answers to each reading, in nats, for prompts beyond the trained window.
        inside: Distance of the answers to each reading within the trained window.
        accepted: tokens of the longest prompt that was answered whole.
        refused: tokens of the shortest one that was refused or cut; None if there was none.
        stated: the window that the server states; None if it states none.
    """

    url: str
    model: str
    compared: str
    computes: str | None
    right: bool
    beyond: dict[str, float]
    inside: dict[str, float]
    accepted: int
    refused: int | None
    stated: int | None
    trained_length: int
    target_length: int
    notes: tuple[str, ...] = ()


@dataclass
class Client:
    """Client of a server of OpenAI's API, whose ``url`` may end in ``/v1``; an empty ``name`` is the first model's."""

    url: str
    key: str | None = None
    name: str = ""
    stated: int | None = field(default=None, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    form: type | None = field(default=None, init=False)  # of a prompt, once the server has taken one

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        status, listed = self._call("/v1/models")
        models = told(listed, "data", kind=list, default=[]) if status == 200 else []
        if not models:
            raise VerificationError(f"{self.url}/v1/models gives no model: status {status}, {_sentence(listed)}")
        chosen = [model for model in models if not self.name or told(model, "id", kind=str) == self.name]
        if not chosen:
            raise InvalidParameterError(f"{self.url} has no model {self.name!r}: it lists {shown(models[0]['id'])}.")
        self.name = told(chosen[0], "id", kind=str)
        inner = told(chosen[0], "meta", "n_ctx", kind=int, default=None)  # of llama.cpp
        self.stated = told(chosen[0], "max_model_len", kind=int, default=inner)

    def continued(self, ids: Sequence[int], text: str, **more: Any) -> JsonObject | str:
        """Return the text and the log-probabilities by which a server continues a prompt; a reason if it refuses.

        Raises:
            VerificationError: the server fails.
        """
        sentence = ""
        for prompt in (list(ids), text):  # tokens leave nothing to the server's tokenizer, but not all take them
            if self.form not in (None, type(prompt)):
                continue
            request = {"model": self.name, "prompt": prompt, "temperature": 0, "max_tokens": 1} | more
            status, said = self._call("/v1/completions", request)
            if status == 200 and told(said, "choices", kind=list, default=[]):
                self.form = type(prompt)
                choice: JsonObject = told(said, "choices", 0, kind=dict)
                read = told(said, "usage", "prompt_tokens", kind=int, default=None)
                if read is not None and read < len(ids) - 1:  # less one: a token that begins every text
                    return f"it reads {read} of {len(ids)} tokens"
                return choice
            sentence = _sentence(said)
            if status >= 500:
                break
        return sentence or "no answer"

    def _call(self, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        answer: Future[tuple[int, bytes]] = Future()

        def ask() -> None:
            try:
                with OPENER.open(Request(self.url + path, data, headers), timeout=SECONDS) as sent:
                    answer.set_result((sent.status, sent.read(BYTES + 1)))
            except (OSError, HTTPException, ValueError) as error:
                answer.set_exception(error)

        threading.Thread(target=ask, daemon=True).start()  # a limit of each read is none of the whole
        try:
            status, text = answer.result(SECONDS)
            if len(text) > BYTES or 300 <= status < 400:
                raise ValueError(f"more than {BYTES:,} bytes" if len(text) > BYTES else "a redirect, not followed")
            try:
                return status, parse_json(text)
            except ValueError:
                if status < 400:
                    raise
            return status, text.decode(errors="replace")
        except (OSError, HTTPException, ValueError) as error:
            reason = printable(str(getattr(error, "reason", error)))[:200] or f"nothing whole in {SECONDS:,} seconds"
            raise VerificationError(f"{self.url} does not answer as a server of OpenAI's API: {reason}.") from error


def told(said: Any, *path: str | int, kind: type, default: Any = ...) -> Any:
    """Return one value of an answer.

    ``path`` names the fields and places in lists that lead to the value; as its ``kind``, float takes any finite
    number. Where the path ends early or in null, the value is ``default``; without a default it must be there.

    Raises:
        VerificationError: the value, or one on the way to it, is of another type.
    """
    found = said
    try:
        for step in path:
            found = None if found is None else found[step]
    except LookupError:
        found = None
    except TypeError:  # neither an object nor a list
        found, default = None, ...
    if found is None and default is not ...:
        return default
    is_number = type(found) in (int, float) and abs(found) < LARGE  # nor NaN
    if not (is_number if kind is float else type(found) is kind):
        place = ".".join(map(str, path))
        raise VerificationError(
            f"The server's answer is malformed: {place} should be {kind.__name__}, found {shown(found)}."
        )
    return found.encode(errors="replace").decode() if kind is str else kind(found)  # JSON can write half a character


def _sentence(said: Any) -> str:
    """Return the message of an error, in whichever form a server writes it."""
    error = said.get("error", said.get("detail", said)) if isinstance(said, dict) else said
    return printable(str(error.get("message", error) if isinstance(error, dict) else error)[:200])


def _top(choice: Any) -> tuple[float, ...]:
    """Return the largest log-probabilities of the first token of an answer, in whichever form a server writes them."""
    listed = told(choice, "logprobs", "content", 0, "top_logprobs", kind=list, default=[])
    named = told(choice, "logprobs", "top_logprobs", 0, kind=dict, default={})
    values = [told(each, "logprob", kind=float) for each in listed]
    return tuple(sorted(values or [told(named, each, kind=float) for each in named], reverse=True)[:TOP])


@torch.no_grad()
def check_server(
    client: Client,
    model: nn.Module,
    tokenizer: Any,
    ids: Tensor,
    *,
    progress: Progress = lambda stage, done: None,
) -> ServerCheck:
    """Compare a server's answers with the model as it was extended, and with the mistakes that servers make.

    Args:
        model: the model that the server ought to compute. Its extension is taken off.
        ids: tokens of a text, [1, tokens], longer than the trained window; the prompts are its beginnings.
        progress: function of the stage and the share of the work done since the last call.

    Raises:
        IncompatibleError: a config that does not say the trained length.
        InvalidParameterError: a text that is not longer than the trained window.
        VerificationError: the server does not answer, or refuses every prompt.
    """
    subject = Subject.of(model)
    trained, target = _lengths(subject)
    longest = min(target, ids.shape[1]) - ANSWER
    if longest <= trained < target:
        raise InvalidParameterError(
            f"The text has {ids.shape[1]} tokens, and the trained window {trained}: give a longer one, or a larger "
            f"--length."
        )
    lengths = [trained * part // (INSIDE + 1) for part in range(1, INSIDE + 1)]
    first = min(trained * 6 // 5, longest)
    lengths += [first + (longest - first) * part // (BEYOND - 1) for part in range(BEYOND)]
    state = patched_state(subject.model)
    part = 1 / (1 + (READINGS if state is None or _is_table(state.method) else 2))  # the server's, and each reading's
    answers, accepted, refused = _answers(
        client, tokenizer, ids, lengths, lambda length: progress(f"server, {length:,} tokens", part / len(lengths))
    )

    def read(label: str) -> dict[int, Tensor]:
        with ticking(model, f"here, {label}", part, progress, passes=1):
            return _log_probabilities(subject, ids, answers)

    inside, beyond = {}, {}
    for label, logs in _readings(subject, read):
        distances = {answer.length: _distance(answer, logs[answer.length]) for answer in answers}
        inside[label] = _mean([value for length, value in distances.items() if length <= trained])
        beyond[label] = _mean([value for length, value in distances.items() if length > trained])
    computes = _nearest(inside if math.isnan(beyond[AS_SAID]) else beyond)
    return ServerCheck(
        url=client.url,
        model=printable(client.name),
        compared="text" if answers[0].tokens else "log-probabilities",
        computes=computes,
        right=computes == AS_SAID and refused is None,
        beyond=beyond,
        inside=inside,
        accepted=accepted,
        refused=refused,
        stated=client.stated,
        trained_length=trained,
        target_length=target,
        notes=tuple(client.notes),
    )


def _lengths(subject: Subject) -> tuple[int, int]:
    """Return the trained length of a model and the length that it was extended to, by its config at least."""
    description, scaling = describe(subject.chain[0]), scaling_of(subject.config)
    trained, target = description.trained_length, description.target_length
    if description.method is None and scaling is not None and scaling.original:
        trained = scaling.original
    if trained is None or target is None:
        raise IncompatibleError(
            f"The config of this {subject.kind} does not say what length its weights were "
            f"trained for. Give the method and the trained length that the server was told."
        )
    return trained, target


def _answers(
    client: Client, tokenizer: Any, ids: Tensor, lengths: Sequence[int], asking: Callable[[int], None]
) -> tuple[list[Continuation], int, int | None]:
    """Ask for continuations of longer and longer prompts, and find where the server stops to give any.

    Returns:
        The answers, the length in tokens of the longest prompt that was answered, and of the shortest prompt that was
        refused, or None if none was refused. Both lengths include an answer.
    """
    answers: list[Continuation] = []
    waiting, refused, reason = sorted(set(lengths)), None, ""
    for _ in range(len(waiting) + STEPS):
        least = answers[-1].length if answers else 0
        length, text = _stable(tokenizer, ids[0], waiting.pop(0) if waiting else (least + (refused or least)) // 2)
        if not least < length < (refused or length + 1):
            break
        asking(length)
        answer = _asked(client, tokenizer, ids[0, :length].tolist(), text)
        if isinstance(answer, Continuation):
            answers.append(answer)
        else:
            waiting, refused, reason = [], length, answer
            if not answers:
                raise VerificationError(f"{client.url} refuses a prompt of {length} tokens: {reason}")
    if refused is not None:
        client.notes.append(f"To a prompt of {refused} tokens it says: {reason}")
    last = answers[-1]
    if last.tokens:  # compared is what all of them have
        answers = [answer for answer in answers if answer.tokens]
    new = ANSWER if last.tokens else 1
    return answers, last.length + new, None if refused is None else refused + new


def _stable(tokenizer: Any, ids: Tensor, length: int) -> tuple[int, str]:
    """Return the length at or below ``length`` at which a text is cut between two tokens, and the text up to there."""
    for shorter in range(length, max(length - 32, 1), -1):
        text: str = tokenizer.decode(ids[:shorter], skip_special_tokens=True)
        if tokenizer(text)["input_ids"] == ids[:shorter].tolist():
            return shorter, text
    return length, tokenizer.decode(ids[:length], skip_special_tokens=True)


def _asked(client: Client, tokenizer: Any, ids: list[int], text: str) -> Continuation | str:
    """Ask for log-probabilities, or for text from a server that has none; return a reason where it gives neither."""
    choice = client.continued(ids, text, logprobs=TOP)
    if not isinstance(choice, str) and (top := _top(choice)):
        return Continuation(len(ids), top=top)
    choice = client.continued(ids, text, max_tokens=ANSWER)
    if isinstance(choice, str):
        return choice
    tokens = tokenizer(told(choice, "text", kind=str), add_special_tokens=False)["input_ids"][:ANSWER]
    return Continuation(len(ids), tokens=tuple(tokens)) if tokens else "it answers nothing"


def _readings(subject: Subject, read: Callable[[str], dict[int, Tensor]]) -> Iterator[tuple[str, dict[int, Tensor]]]:
    """Yield each reading of the model with its log-probabilities at the end of each prompt, and after its answer."""
    trained, target = _lengths(subject)
    yield AS_SAID, read(AS_SAID)
    state, model = patched_state(subject.model), subject.chain[0]
    if state is not None:
        unpatch(model)
        yield PLAIN, read(PLAIN)
    method = None if state is None else state.method
    if not subject.rotaries or (method is not None and not _is_table(method)):
        return
    in_files = scaling_of(subject.config) is not None
    scaling = ("replace" if in_files else None) if state is None else state.extension.scaling
    sites = find_sites(subject, trained, scaled=scaling == "extend")
    if len(sites) != 1:  # several would need different factors
        return
    for label, wrong in _mistakes(method, sites[0].spec).items():
        divisors = tuple((plain_inv_freq(sites[0].spec) / wrong.inv_freq).tolist())
        is_plain = wrong.attention_scale == 1 and set(divisors) == {1.0}
        if (is_plain and not (state is None and in_files)) or not all(0 < part < math.inf for part in divisors):
            continue
        as_wrong = LongRoPE(
            factor=target / trained,
            short_factor=divisors,
            long_factor=divisors,
            attention_factor=wrong.attention_scale,
        )
        with patched(model, as_wrong, trained_length=trained, scaling=scaling):
            yield label, read(label)


def _mistakes(method: Method | None, rope: RopeSpec) -> dict[str, Frequencies]:
    """Return the usual mistakes of servers in an extension, or in the scaling in the files if ``method`` is None."""
    plain, usual = plain_inv_freq(rope), replace(rope, base=USUAL_BASE, inv_freq=None)
    other_base = f"base {USUAL_BASE:g} in place of {rope.base:g}"
    mistakes = {other_base: Frequencies(plain_inv_freq(usual))}
    if not isinstance(method, RopeMethod):
        mistakes["scaling of the config ignored"] = Frequencies(plain)
    else:
        length = method.target_length(rope.trained_length)
        right = method.frequencies(rope, length)
        mistakes["temperature ignored"] = Frequencies(right.inv_freq)
        mistakes["temperature alone"] = Frequencies(plain, right.attention_scale)
        mistakes["every frequency divided by the factor"] = Frequencies(plain / method.factor)
        mistakes[other_base] = method.frequencies(usual, length)
        mistakes = {
            label: wrong
            for label, wrong in mistakes.items()
            if not (wrong.attention_scale == right.attention_scale and wrong.inv_freq.equal(right.inv_freq))
        }
    return mistakes


def _is_table(method: Method) -> bool:
    """Return whether a method is one set of frequencies for every text."""
    return isinstance(method, RopeMethod) and not isinstance(method, RemapMethod) and not method.dynamic


def _log_probabilities(subject: Subject, ids: Tensor, answers: Sequence[Continuation]) -> dict[int, Tensor]:
    """Return log-probabilities behind each prompt, [tokens of its answer + 1, vocabulary]; in float32, on the CPU."""
    model, device, rows = subject.chain[0], subject.model.device, {}
    if any(answer.tokens for answer in answers) or follows_length(subject):
        for answer in answers:
            read = torch.cat((ids[:, : answer.length], torch.tensor([answer.tokens], dtype=ids.dtype)), dim=1)
            parts = [part for _, part in logits_in_chunks(model, read.to(device), start=answer.length - 1)]
            rows[answer.length] = torch.cat(parts, dim=1)[0]
    else:
        lengths = sorted(answer.length for answer in answers)
        for first, part in logits_in_chunks(model, ids[:, : lengths[-1]].to(device), start=lengths[0] - 1, chunk=256):
            for length in lengths:
                if first <= length - 1 < first + part.shape[1]:
                    rows[length] = part[0, length - 1 - first][None].clone()
    return {length: logits.float().log_softmax(-1).cpu() for length, logits in rows.items()}


def _distance(answer: Continuation, logs: Tensor) -> float:
    """Return how far a reading is from an answer, in nats: in its largest probabilities, or in the chosen tokens."""
    if answer.top:
        own = logs[0].topk(len(answer.top)).values
        return float((own - torch.tensor(answer.top)).abs().mean())
    chosen = logs[:-1].gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    return float((logs[:-1].amax(-1) - chosen).mean())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _nearest(distances: dict[str, float]) -> str | None:
    """Return the reading that is near, if all others are far."""
    (label, nearest), *others = sorted(distances.items(), key=lambda item: item[1])
    return label if nearest <= NEAR and all(other > 2 * nearest + FLOOR for _, other in others) else None
