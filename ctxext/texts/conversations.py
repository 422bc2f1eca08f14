"""Conversations as tokens: what a chat template makes of messages, and which of the tokens are answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError

from ctxext.errors import InvalidParameterError
from ctxext.files import JsonObject, parse_json

Row = Mapping[str, Any]
"""Row of a table, by the names of its columns; or a message of a conversation."""
ANSWERS = "assistant"  # role of the messages that a model is to write
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which a template says what the model writes
# Fields of a message that say by 0 or 1, or by false or true, whether it is learned (OpenAI and Mistral; axolotl;
# Fireworks; ms-swift), and words in the names of fields that may say it in another way.
LEARNED = ("weight", "train", "training", "trainable", "loss")
OF_LOSS = re.compile(r"(^|[\W_])(loss|train|learn|weight|mask|ignor|skip|exclud|supervis|labels|grad(?![a-z]))", re.I)
TEXTS = ("role", "content", "tool_calls", "function_call")  # fields that hold what was said, whatever it is about
TRIED = "ctxext"  # a text that chat templates are tried with
# What a chat template may raise, and a parser of calls, given values that it was not written for.
OF_TEMPLATES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError)


def parsed(value: Any) -> Any:
    """Return what a JSON text of a list or an object says, and anything else as it is."""
    with contextlib.suppress(ValueError):
        return parse_json(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    return value


def normalised(text: str) -> str:
    """Take out a byte order mark and carriage returns, which change how a text is tokenised, and lone surrogates."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _normalised_in(value: Any) -> Any:
    """Return a value with all texts in its lists and objects ``normalised``."""
    if isinstance(value, dict):
        return {key: _normalised_in(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_normalised_in, value))
    return normalised(value) if isinstance(value, str) else value


def checked_messages(value: Any, row: Row, place: str) -> tuple[JsonObject, ...]:
    """Return the messages in a row of a table, which may hold them as JSON texts.

    Raises:
        InvalidParameterError: an item that is not a message of text; tools, which are not read; or a conversation that
            is learned in part.
    """
    messages = [parsed(message) for message in parsed(value)]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            found = ", ".join(message) if isinstance(message, dict) else type(message).__name__
            raise InvalidParameterError(f"{place} a list of something else than role and content: {found}.")
        content, rest = message.get("content"), message.keys() - {"role", "content"}
        if not isinstance(content, str) and (content is not None or not any(message[key] for key in rest)):
            kind = "missing" if content is None else f"{type(content).__name__}, not text"
            raise InvalidParameterError(f"{place} a message whose content is {kind}. Give content as text.")
    if row.get("tools"):
        raise InvalidParameterError(f"{place} a conversation with tools, which are not read. Leave out such rows.")
    for name, said in _of_loss({key: column for key, column in row.items() if not isinstance(column, dict)}):
        if said not in (1, True):
            raise InvalidParameterError(
                f"{place} a conversation with {name}={said!r}, which is not read. Give its messages a weight of 0 or 1."
            )
    return tuple(messages)


def _of_loss(fields: Row) -> list[tuple[str, Any]]:
    """Return the fields of a message, or of a whole row, that say something about the loss."""
    found = []
    for name, value in fields.items():
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
        if isinstance(value, dict) and name not in TEXTS:
            found += _of_loss(value)
        elif value is not None and (OF_LOSS.search(words) or (name == "label" and isinstance(value, bool))):
            found.append((name, value))  # label=false: preferences of whole conversations
    return found


def _is_learned(message: Row, place: str) -> bool:
    """Return whether a message is to be learned by what its fields say.

    Raises:
        InvalidParameterError: a field that says something else than yes or no.
    """
    said = _of_loss(message)
    for name, value in said:
        if name not in LEARNED or name not in message or not isinstance(value, int | float) or value not in (0, 1):
            raise InvalidParameterError(
                f"{place} has {name}={value!r}, which may change its loss and is not read. Say by weight=0 that it is "
                f"not learned, by weight=1 or nothing that it is, and take {name} out."
            )
    return all(value for _, value in said)


def _as_written(message: Row, place: str) -> JsonObject:
    """Return a message as chat templates take it: without nulls, and with the arguments of calls as objects.

    OpenAI's format holds arguments as JSON texts. Tables hold a null for each field of other messages, and a template
    that asks whether a field is there would write it.

    Raises:
        InvalidParameterError: arguments that are not a JSON object.
    """
    written: JsonObject = {"content": None} | {key: value for key, value in message.items() if value is not None}
    calls, call = parsed(written.pop("tool_calls", None)), parsed(written.pop("function_call", None))
    if calls:
        written["tool_calls"] = [_call(parsed(one), place) for one in calls]
    return written | {"function_call": _call(call, place)} if call else written


def _call(call: Any, place: str) -> JsonObject:
    if not isinstance(call, dict):
        raise InvalidParameterError(f"{place} has a call of a tool that is no JSON object: {call!r:.80}.")
    if "function" in call:
        return {**call, "function": _call(parsed(call["function"]), place)}
    given = call.get("arguments")
    arguments = {} if given in (None, "") else parsed(given)
    if not isinstance(arguments, dict):
        raise InvalidParameterError(
            f"{place} calls {call.get('name')!r} with arguments={given!r:.80}, which are no JSON object. Mend them."
        )
    return {**call, "arguments": arguments}


def content_for(tokenizer: Any) -> Callable[[str], Any]:
    """Return a function from a text to the content of a message, in the form that the chat template writes.

    Nearly always that is the text itself. Templates of processors (Llava, SmolVLM) may go over parts of a content,
    images and texts, and write nothing of a content that is one text.
    """

    def writes(content: Any) -> bool:
        try:
            return TRIED in tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        except OF_TEMPLATES:
            return False

    return _as_part if not writes(TRIED) and writes(_as_part(TRIED)) else str


def _as_part(text: str) -> list[JsonObject]:
    return [{"type": "text", "text": text}]


def chat_tokens(conversation: Any, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and for each of them whether the model is to write it.

    Answers are what the template marks by ``{% generation %}``. Where it marks nothing, they are what an assistant's
    message adds to the conversation before it and the template's invitation to answer, what ends a message included.
    Messages that say so (``weight`` 0, ``train`` false) are read and not learned.

    Raises:
        InvalidParameterError: no chat template, one that refuses the messages, or one that writes earlier messages
            differently once later ones follow, without marks; or a field of a message that is not read.
    """
    name = conversation.name
    places = [f"Message {number} of the conversation {name!r}" for number, _ in enumerate(conversation.messages, 1)]
    learned = list(map(_is_learned, conversation.messages, places))
    messages = [_normalised_in(_as_written(*each)) for each in zip(conversation.messages, places, strict=True)]
    if not tokenizer.chat_template:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} has no chat template, which the conversation {name!r} needs. Take a tokenizer "
            f"with one (an instruct model has it), or give texts."
        )

    content = content_for(tokenizer)
    messages = [one if one["content"] is None else one | {"content": content(one["content"])} for one in messages]

    def ids(messages: list[Any], **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(messages, return_dict=True, **options)
        except OF_TEMPLATES as error:
            raise InvalidParameterError(
                f"The chat template of {type(tokenizer).__name__} refuses the conversation {name!r}: {error}."
            ) from error

    if tokenizer.is_fast and MARKED.search(tokenizer.get_chat_template()):
        marked = ids(messages, return_assistant_tokens_mask=True)
        whole, answers = list(marked.input_ids), list(map(bool, marked["assistant_masks"]))
    else:
        whole = list(ids(messages).input_ids)
        answers = [False] * len(whole)
    is_marked = any(answers)
    for turn, message in enumerate(messages):
        if message["role"] != ANSWERS or learned[turn] == is_marked or not (turn or is_marked):
            continue  # it is marked as it should be; a first message answers nothing
        asked = ids(messages[:turn], add_generation_prompt=not is_marked).input_ids if turn else []
        answered = ids(messages[: turn + 1]).input_ids
        if answered[: len(asked)] != asked or whole[: len(answered)] != answered:
            raise InvalidParameterError(
                f"The chat template writes the first {turn + 1} messages of the conversation {name!r} differently "
                f"where others follow, so that answers cannot be told apart. Mark them in the template by "
                f"{{% generation %}}, and learn all of them."
            )
        answers[len(asked) : len(answered)] = [learned[turn]] * (len(answered) - len(asked))
    return whole, answers
