"""Conversations as tokens: what a chat template makes of messages, and which of the tokens are answers."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import TemplateError

from ctxext.errors import InvalidParameterError
from ctxext.texts.documents import Document

ANSWERS = "assistant"  # role of the messages that a model is to write
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # by which a template says what the model writes


def chat_tokens(conversation: Document, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and for each of them whether the model is to write it.

    Answers are what the template marks by ``{% generation %}``. Where it marks nothing, they are what an assistant's
    message adds to the conversation before it and the template's invitation to answer, what ends a message included.

    Args:
        conversation: a document with messages.
        tokenizer: a transformers tokenizer.

    Raises:
        InvalidParameterError: no chat template, one that refuses the messages, or one without marks that writes earlier
            messages differently once later ones follow.
    """
    name, messages = conversation.name, list(conversation.messages)
    if not tokenizer.chat_template:
        raise InvalidParameterError(
            f"{type(tokenizer).__name__} has no chat template, which the conversation {name!r} needs. Take a tokenizer "
            f"with one (an instruct model has it), or give texts."
        )

    def ids(messages: list[Any], **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(messages, return_dict=True, **options)
        except TemplateError as error:
            raise InvalidParameterError(
                f"The chat template of {type(tokenizer).__name__} refuses the conversation {name!r}: {error}."
            ) from error

    if tokenizer.is_fast and MARKED.search(tokenizer.get_chat_template()):
        marked = ids(messages, return_assistant_tokens_mask=True)
        return list(marked.input_ids), list(map(bool, marked["assistant_masks"]))
    whole = list(ids(messages).input_ids)
    answers = [False] * len(whole)
    for turn, message in enumerate(messages):
        if turn and message["role"] == ANSWERS:  # a first message answers nothing
            asked = ids(messages[:turn], add_generation_prompt=True).input_ids
            answered = ids(messages[: turn + 1]).input_ids
            if answered[: len(asked)] != asked or whole[: len(answered)] != answered:
                raise InvalidParameterError(
                    f"The chat template writes the first {turn + 1} messages of the conversation {name!r} differently "
                    f"where others follow, so that answers cannot be told apart. Mark them in the template by "
                    f"{{% generation %}}."
                )
            answers[len(asked) : len(answered)] = [True] * (len(answered) - len(asked))
    return whole, answers
