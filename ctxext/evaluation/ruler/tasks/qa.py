"""Question answering: the paragraphs that hold the answer, among paragraphs that do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.ruler.tasks.base import Question, Setting, Sources, Task, any_of
from ctxext.files import parse_json

TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {query}"
)
PREFIX = " Answer:"


@dataclass(frozen=True)
class Asked:
    """One question of a data set.

    Args:
        answers: any of them will do.
        related: indices of documents that are put in before random ones.
    """

    query: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


# Questions that have an answer, and all documents.
Read = tuple[list[Asked], list[str]]


class QuestionAnswering(Task):
    """Questions in the order of their data set, each with its own documents first and random others."""

    tokens_to_generate = 32
    unit = "documents"
    data_set: ClassVar[str]
    source: ClassVar[str]
    read: ClassVar[Callable[[Any], Read]]

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        path: Path = getattr(setting.sources, self.source)
        try:
            self._asked, self._documents = type(self).read(parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidParameterError(f"{path} is not {self.data_set}'s dev set in JSON: {error!r}.") from error
        if not self._asked:
            raise InvalidParameterError(f"{path} holds no question that can be answered.")

    @classmethod
    def why_not(cls, sources: Sources) -> str | None:
        if getattr(sources, cls.source) is None:
            return (
                f"it needs {cls.data_set}'s dev set, which ctxext does not bring; give the JSON file (--{cls.source})"
            )
        return None

    @property
    def least(self) -> int:
        """Documents of the question with the most of its own."""
        return max(len(asked.gold) for asked in self._asked)

    def question(self, size: int, index: int, generator: random.Random) -> Question:
        if index >= len(self._asked):
            raise InvalidParameterError(
                f"{self.name}: the data set holds {len(self._asked):,} questions with an answer, found a request for "
                f"number {index + 1:,}. Ask for fewer samples."
            )
        asked = self._asked[index]
        documents = self._chosen(asked, size, generator)
        generator.shuffle(documents)
        context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, start=1))
        prompt = self.setting.dress(TEMPLATE.format(context=context, query=asked.query)) + PREFIX
        return Question(prompt, asked.answers)

    def score(self, reply: str, answers: Sequence[str]) -> float:
        return any_of(reply, answers)

    def _chosen(self, asked: Asked, size: int, generator: random.Random) -> list[str]:
        """Choose the question's documents, then related and random ones; repeat all of them if they are too few."""
        if size >= len(self._documents):
            repeats = -(-size // len(self._documents))
            return (self._documents * repeats)[:size]
        room = size - len(asked.gold)
        if room <= len(asked.related):
            chosen = generator.sample(asked.related, room)
        else:
            near = {*asked.gold, *asked.related}
            others = [index for index in range(len(self._documents)) if index not in near]
            chosen = [*asked.related, *generator.sample(others, room - len(asked.related))]
        return [self._documents[index] for index in (*asked.gold, *chosen)]


def _read_squad(data: Any) -> Read:
    """Read SQuAD 2.0: one paragraph holds the answer; the other paragraphs of its article come first beside it."""
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    place = {text: index for index, text in enumerate(documents)}
    asked = []
    for article in articles:
        indices = [place[paragraph["context"]] for paragraph in article]
        for paragraph in article:
            gold = place[paragraph["context"]]
            related = tuple(index for index in indices if index != gold)
            asked += [
                Asked(item["question"], tuple(answer["text"] for answer in item["answers"]), (gold,), related)
                for item in paragraph["qas"]
                if not item["is_impossible"]
            ]
    return asked, documents


def _read_hotpotqa(data: Any) -> Read:
    """Read HotpotQA: the answer takes two of the ten paragraphs that come with each question."""
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]] for item in data]
    documents = sorted({text for texts in contexts for text in texts})
    place = {text: index for index, text in enumerate(documents)}
    asked = [
        Asked(item["question"], (item["answer"],), tuple(place[text] for text in texts))
        for item, texts in zip(data, contexts, strict=True)
    ]
    return asked, documents


DATA_SETS = (
    QuestionAnswering.variant("qa_1", data_set="SQuAD 2.0", source="squad", read=staticmethod(_read_squad)),
    QuestionAnswering.variant("qa_2", data_set="HotpotQA", source="hotpotqa", read=staticmethod(_read_hotpotqa)),
)
