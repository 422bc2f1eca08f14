"""Pairs of a sentence and a question about it that share no content word: only knowledge of the world joins them.

The idea comes from NoLiMa, Modarressi et al., arXiv:2502.05167. Its sentences are under a licence that does not allow
their use here, so all of these are our own.
"""

from __future__ import annotations

# A kind of knowledge: the sentence, the beginning of the answer, and pairs of phrases that fill the two.
Kind = tuple[str, str, tuple[tuple[str, str], ...]]


def _kind(sentence: str, answer: str, pairs: str) -> Kind:
    """Read the pairs of a kind of knowledge, one in each line."""
    parted = (line.strip().partition(": ") for line in pairs.strip().splitlines())
    return sentence, answer, tuple((fact, asked) for fact, _, asked in parted)


COUNTRIES = _kind(
    "The house next to {fact} belongs to {name}.",
    "The visitor of {asked} is called",
    """
    the Eiffel Tower: France
    the Colosseum: Italy
    the Acropolis: Greece
    Mount Fuji: Japan
    the Great Wall: China
    the Taj Mahal: India
    the pyramids of Giza: Egypt
    the ruins of Machu Picchu: Peru
    the Brandenburg Gate: Germany
    the Kremlin: Russia
    the Statue of Liberty: America
    Big Ben: England
    the palace of the Alhambra: Spain
    Niagara Falls: Canada
    the Sydney Opera House: Australia
    the statue of Christ the Redeemer: Brazil
    the Hagia Sophia: Turkey
    the temples of Angkor Wat: Cambodia
    the rock tombs of Petra: Jordan
    the step pyramid of Chichen Itza: Mexico
    the Matterhorn: Switzerland
    the bronze Little Mermaid: Denmark
    the Blarney Stone: Ireland
    """,
)
TRADES = _kind(
    "The one who spends the day {fact} is {name}.",
    "The person who works as {asked} is",
    """
    filling cavities and pulling teeth: a dentist
    kneading dough for loaves and rolls: a baker
    flying passengers across the ocean: a pilot
    ploughing fields and milking cows: a farmer
    marking the homework of thirty pupils: a teacher
    cutting hair and trimming beards: a barber
    mending leaking pipes and dripping taps: a plumber
    defending the accused in court: a lawyer
    listening to the lungs of the sick: a doctor
    sawing boards for tables and doors: a carpenter
    hauling nets full of cod from the sea: a fisherman
    chasing and arresting thieves: a police officer
    drawing plans of new houses: an architect
    lending novels to readers: a librarian
    turning a telescope towards distant stars: an astronomer
    sewing suits and dresses: a tailor
    digging coal deep under the ground: a miner
    frying fish for the guests of a restaurant: a cook
    """,
)
ANIMALS = _kind(
    "The new home of {fact} is that of {name}.",
    "The owner of {asked} is",
    """
    a curly poodle: a dog
    a playful Siamese kitten: a cat
    a white stallion: a horse
    a yellow canary: a bird
    a large golden carp: a fish
    a young python: a snake
    a hairy tarantula: a spider
    a newborn lamb: a sheep
    a spotted calf: a cow
    """,
)
KINDS = (COUNTRIES, TRADES, ANIMALS)
