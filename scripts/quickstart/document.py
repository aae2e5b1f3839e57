"""The document that is asked about, and how long it has to be so that engines can share nearly all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

OPENING = """\
Below is the log of the lighthouse on Skarra Point. Read it and answer the question at its end in one short sentence.

LOG OF THE LIGHTHOUSE ON SKARRA POINT
"""
#: What the questions are about stands last: a model of 135 million parameters remembers the end best.
CLOSING = """ [here some pages are missing]

Last page. The new keeper should know these things. The dog of the lighthouse is called Juniper. The supply boat is \
called Merganser, and she comes every second Thursday. The spare key hangs behind the barometer.
"""
FIRST_QUESTION = "\nQuestion: What is the name of the dog of the lighthouse?"
SECOND_QUESTION = "\nQuestion: What is the name of the supply boat?"

_WIND = (
    "a light wind from the south",
    "a gale from the north-west",
    "no wind at all",
    "a steady easterly breeze",
    "squalls that turned from west to north",
    "a cold wind off the land",
    "a warm wind and a falling glass",
)
_SEA = (
    "the sea flat as slate",
    "a long swell on the reef",
    "breakers over the landing",
    "fog banks a mile out",
    "a short grey sea",
    "drift ice along the shore",
    "rain that hid the horizon",
    "a clear view to the far islands",
    "spray up to the gallery",
)
_SEEN = (
    "Two herring boats went by under sail before noon.",
    "A steamer with a red funnel asked for our number.",
    "Nothing passed all day but gannets.",
    "A barque hove to and waited for the tide.",
    "The mail cutter signalled that all was well.",
    "Seals lay on the skerries until dusk.",
    "A schooner lost her topmast and was towed home.",
    "Three whales blew close to the point.",
    "The pilot came ashore and drank tea with us.",
    "A raft of planks drifted in and we saved the wood.",
    "Geese flew over in long lines, going south.",
)
_DONE = (
    "Trimmed the wicks and cleaned the lens.",
    "Painted the railing of the gallery.",
    "Wound the clockwork every four hours.",
    "Carried forty cans of oil up the stairs.",
    "Mended the roof of the boat shed.",
    "Dug the potato patch and found an old coin.",
    "Wrote to the harbour office about the fog bell.",
    "Oiled the bearings; the light turns quietly again.",
    "Caulked the dinghy.",
    "Salted two barrels of cod.",
    "Repaired the window that the storm had broken.",
    "Counted the stores: flour for nine weeks.",
    "Swept the chimney.",
)
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")


@dataclass(frozen=True)
class Prompts:
    """Two prompts with a common beginning. Counts in tokens."""

    first: str
    second: str
    first_tokens: int
    second_tokens: int
    common_tokens: int
    shared_tokens: int


def log_words() -> list[str]:
    """Words of the log's entries for ten months, the same in every run."""
    words: list[str] = []
    for number, (month, day) in enumerate(product(_MONTHS, range(1, 29))):
        # Lists of lengths without common factors: the combination of sentences does not come back.
        wind, sea = _WIND[number % 7], _SEA[number % 9]
        text = f"\n{day} {month}. {wind.capitalize()}, {sea}. {_SEEN[number % 11]} {_DONE[number % 13]}"
        words += text.replace("\n", "\n ").split(" ")
    return words


def text_of(words: int) -> str:
    """The document with so many words of entries."""
    return OPENING + " ".join(log_words()[:words]).replace(" \n ", "\n").replace("\n ", "\n") + CLOSING


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two prompts begin with alike."""
    shorter = min(len(first), len(second))
    return next((at for at in range(shorter) if first[at] != second[at]), shorter)


def fit(token_ids: Callable[[str], Sequence[int]], chunk_tokens: int, chunks: int, most_after: int) -> Prompts:
    """The shortest document that has ``chunks`` whole chunks in common between both questions.

    Raises ValueError when more than ``most_after`` tokens would follow the last shared chunk.
    """
    wanted = chunk_tokens * chunks

    def common(words: int) -> int:
        text = text_of(words)
        return common_length(token_ids(text + FIRST_QUESTION), token_ids(text + SECOND_QUESTION))

    # Up in small steps: an engine does not even count the tokens of a prompt that is too long for it.
    low, high = 0, wanted // 3
    while common(high) < wanted:
        if high > len(log_words()):
            raise ValueError(f"the whole document has fewer than {wanted} tokens for this model")
        low, high = high, high + wanted // 12
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if common(middle) >= wanted else (middle, high)
    text = text_of(high)
    prompts = Prompts(
        first=text + FIRST_QUESTION,
        second=text + SECOND_QUESTION,
        first_tokens=len(token_ids(text + FIRST_QUESTION)),
        second_tokens=len(token_ids(text + SECOND_QUESTION)),
        common_tokens=common(high),
        shared_tokens=wanted,
    )
    longest = max(prompts.first_tokens, prompts.second_tokens)
    if not 0 < longest - wanted <= most_after:
        raise ValueError(f"{longest - wanted} tokens follow the last shared chunk; at most {most_after} may")
    return prompts
