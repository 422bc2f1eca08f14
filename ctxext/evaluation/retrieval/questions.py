"""Questions that no search for the words of the question answers, several about one text.

| task | hidden | asked | in the style of |
|---|---|---|---|
| ``rounds`` | several rounds of two requests, among rounds of others | the answer to the n-th of one of them | MRCR |
| ``associations`` | a sentence each about several people | whom a question fits, by knowledge of the world | NoLiMa |
| ``aggregate`` | the entries of a ledger | a number of entries, the most frequent name, or a sum, in turns | Oolong |
| ``variables`` | chains of assignments | the value of the last variable of a chain | RULER, with several keys |

Every answer is the right one to one of the questions and a wrong one to the others, so that a model that knows nothing
is right by chance. All of them have the same number of tokens. Questions are drawn without a length: the same ones are
asked at every length, with more text around what they ask for.

Sources of the ideas: Vodrahalli et al., arXiv:2409.12640 (MRCR); Modarressi et al., arXiv:2502.05167 (NoLiMa); Bertsch
et al., arXiv:2511.02817 (Oolong); Hsieh et al., arXiv:2404.06654 (RULER). Wording and construction are our own.
"""

from __future__ import annotations

import functools
import itertools
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.errors import InvalidParameterError
from ctxext.evaluation.retrieval import TASK_NAMES
from ctxext.evaluation.retrieval.associations import KINDS
from ctxext.evaluation.ruler.tasks.base import distinct
from ctxext.evaluation.ruler.tasks.vt import LETTERS, chained
from ctxext.texts.corpus import tokens_behind

LEAST_CHOICES, MOST_CHOICES = 2, 8
NAMES = """
Adam Alan Albert Alex Alice Amy Andrew Anna Arthur Barbara Ben Brian Carl Carol Charles Clara Daniel David Diana
Edward Emily Emma Eric Frank George Grace Hannah Harry Helen Henry Jack James Jane John Joseph Julia Karen Kate
Kevin Laura Linda Lisa Lucy Maria Mark Martin Mary Michael Nancy Oliver Oscar Paul Peter Philip Rachel Richard
Robert Rose Ruth Sam Sarah Simon Sophie Stephen Susan Thomas Victor Walter William
"""
WORDS = """
anchor apple arrow basket bell bottle bridge button camera candle carpet castle chair circle cloud coffee copper
cotton crystal desert diamond dragon eagle engine fabric feather finger flower forest garden ghost glass hammer
harbor honey horse island jacket kettle ladder lemon letter marble market mirror motor needle ocean orange
palace paper pencil pepper piano pillow planet pocket rabbit ribbon river rocket saddle shadow silver spoon
stone sugar table temple thunder tiger tower tunnel valley velvet violin wagon window winter
"""
TOPICS = """
autumn birds breakfast cities cooking dreams families farming football history holidays languages mathematics
medicine mountains music painting poetry politics railways sailing schools ships stars theatre weather
"""
GOODS = "apples books candles carpets chairs clocks coats lamps lemons shoes spoons"
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

ROUND = "User: Give me a code word for {topic}.\nAssistant: The code word is {word}.\n"
LEDGER = "\nLedger: {name} sold {number} {good}.\n"


@dataclass(frozen=True)
class QuestionSet:
    """Questions about one text, before it has a length.

    Args:
        needles: Texts to hide, in the order in which they are to stand.
        requests: Ends of the prompt, one for each question; the answer follows.
        answers: Right answer to each request, a wrong one to the others; no request contains any of them.
        others: Texts to hide the needles among; none for the haystack that all tasks share.
    """

    opening: str
    needles: tuple[str, ...]
    requests: tuple[str, ...]
    answers: tuple[str, ...]
    others: tuple[str, ...] = ()


# Draws a number of strings out of a pool, of equally many tokens: the most common number.
Alike = Callable[[Sequence[str], int, random.Random], list[str]]


def alike_for(tokenizer: Any) -> Alike:
    """Return what draws answers of equally many tokens out of a pool."""

    @functools.cache
    def tokens(word: str) -> int:
        return len(tokens_behind(tokenizer, f" {word}"))

    def alike(pool: Sequence[str], count: int, generator: random.Random) -> list[str]:
        lengths = [tokens(word) for word in pool]
        most_common = max(sorted(set(lengths)), key=lengths.count)
        chosen = [word for word, length in zip(pool, lengths, strict=True) if length == most_common]
        if len(chosen) < count:
            raise InvalidParameterError(
                f"This tokenizer writes only {len(chosen)} of {len(pool)} possible answers in equally many tokens, and "
                f"{count} are needed. Ask for fewer --choices."
            )
        return generator.sample(chosen, count)

    return alike


def rounds(alike: Alike, choices: int, index: int, generator: random.Random) -> QuestionSet:
    """Ask for the answer of the n-th round about each of two topics, in a long conversation about many."""
    topics = TOPICS.split()
    generator.shuffle(topics)
    first, second, *others = topics
    words = alike(WORDS.split(), choices, generator)
    half = choices - choices // 2
    asked = [(first, nth) for nth in ORDINALS[:half]] + [(second, nth) for nth in ORDINALS[: choices - half]]
    pairs = [pair for pair in itertools.product(others, WORDS.split()) if pair[1] not in words]
    generator.shuffle(pairs)
    lines = [ROUND.format(topic=topic, word=word) for (topic, _), word in zip(asked, words, strict=True)]
    return QuestionSet(
        "A user asks an assistant for many code words. Remember them in their order.\n",
        _mixed([lines[:half], lines[half:]], generator),
        tuple(
            f"\nUser: Give me again the {nth} code word for {topic}.\nAssistant: The code word is"
            for topic, nth in asked
        ),
        tuple(words),
        tuple(ROUND.format(topic=topic, word=word) for topic, word in pairs),
    )


def associations(alike: Alike, choices: int, index: int, generator: random.Random) -> QuestionSet:
    """Ask whom each question fits; the sentence about that person contains no content word of the question."""
    sentence, request, pairs = KINDS[index % len(KINDS)]
    names = alike(NAMES.split(), choices, generator)
    facts = generator.sample(pairs, choices)
    needles = [f"\n{sentence.format(name=name, fact=fact)}\n" for name, (fact, _) in zip(names, facts, strict=True)]
    return QuestionSet(
        "Some people are mentioned in the long text below. Remember them. You will be asked about them.\n",
        _mixed([[needle] for needle in needles], generator),
        tuple(f"\n{request.format(asked=asked)}" for _, asked in facts),
        tuple(names),
    )


def aggregate(alike: Alike, choices: int, index: int, generator: random.Random) -> QuestionSet:
    """Ask for the numbers of entries of people in a ledger, for the most frequent, or for sums, in turns."""
    names = alike(NAMES.split(), choices, generator)
    goods = generator.sample(GOODS.split(), choices)
    # Each entry: who, what and how many.
    entries: list[tuple[str, str, int]] = []
    if index % 3 == 0:
        answers = alike([str(number) for number in range(1, 10)], choices, generator)
        for name, count in zip(names, answers, strict=True):
            entries += [(name, generator.choice(goods), generator.randint(2, 9)) for _ in range(int(count))]
        requests = [f"The number of entries of {name} in the ledger is" for name in names]
    elif index % 3 == 1:
        answers = names
        for number, good in enumerate(goods):
            sellers = (names[number], names[number], names[number - 1])
            entries += [(name, good, generator.randint(2, 9)) for name in sellers]
        requests = [f"Most of the {good} were sold by" for good in goods]
    else:
        answers = alike([str(total) for total in range(10, 19)], choices, generator)
        for name, total in zip(names, map(int, answers), strict=True):
            part = generator.randint(total - 9, 9)
            entries += [(name, goods[0], part), (name, goods[0], total - part)]
        requests = [f"The sum of all {goods[0]} that {name} sold is" for name in names]
    needles = [LEDGER.format(name=name, number=number, good=good) for name, good, number in entries]
    return QuestionSet(
        "The entries of a ledger are scattered in the long text below. You will be asked about all of them.\n",
        _mixed([[needle] for needle in needles], generator),
        tuple(f"\n{request}" for request in requests),
        tuple(answers),
    )


def variables(alike: Alike, choices: int, index: int, generator: random.Random) -> QuestionSet:
    """Ask for the value of the last variable of each of several chains."""
    values = alike([str(number) for number in range(10_000, 99_999, 89)], choices, generator)
    names = distinct(2 * choices, lambda: "".join(generator.choices(string.ascii_uppercase, k=LETTERS)))
    chains = [names[start : start + 2] for start in range(0, len(names), 2)]
    lines = [[f"\n{line}\n" for line in chained(chain, value)] for chain, value in zip(chains, values, strict=True)]
    return QuestionSet(
        "Chains of variable assignments are hidden in the long text below. Follow each chain to its value.\n",
        _mixed(lines, generator),
        tuple(
            f"\nQuestion: Which number is the value of VAR {chain[-1]}?\nAnswer: VAR {chain[-1]} =" for chain in chains
        ),
        tuple(values),
    )


def _mixed(series: Sequence[Sequence[str]], generator: random.Random) -> tuple[str, ...]:
    """Mix several series of texts at random, and keep the order within each."""
    iterators = [iter(texts) for texts in series]
    turns = [iterator for iterator, texts in zip(iterators, series, strict=True) for _ in texts]
    generator.shuffle(turns)
    return tuple(next(iterator) for iterator in turns)


Task = Callable[[Alike, int, int, random.Random], QuestionSet]
TASKS: dict[str, Task] = dict(zip(TASK_NAMES, (rounds, associations, aggregate, variables), strict=True))
