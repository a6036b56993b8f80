"""Texts that are the same but for details: to drop repeated prompts, and those that are kept for evaluation."""

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable


# Characters that are compared at a time, in any language.
SHINGLE = 8
# Texts are alike if so much of the shingles of both together are in both,
ALIKE = 0.7
# and one holds another if so much of the other's shingles are in it.
HELD = 0.7
# A sketch is as many of a text's smallest hashes; pairs that share fewer than a few are not compared.
_SKETCH, _FEWEST_SHARED = 16, 4
# What more texts than these have is taken for a phrase that says nothing about what is asked.
_COMMON_HASH, _COMMON_SHINGLE = 500, 5
# Shorter texts, and what is left of them without common phrases, are compared exactly only.
_FEWEST_SHINGLES = 12


def normalise(text: str) -> str:
    """A text in lower case and plain forms of its characters, without punctuation and doubled spaces."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower()))


def shingles(text: str) -> frozenset[int]:
    """Hashes of all [`SHINGLE`] characters in a row of a normalised text."""
    encoded = text.encode("utf-32-le")
    last = max(len(text) - SHINGLE, 0)
    return frozenset(zlib.crc32(encoded[4 * place : 4 * (place + SHINGLE)]) for place in range(last + 1))


class NearDuplicates:
    """Texts, of which no two are alike."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._shingles: list[frozenset[int]] = []
        self._holders: dict[int, list[int]] = defaultdict(list)  # texts by the hashes of their sketch

    def add(self, text: str) -> bool:
        """Add a text unless one like it is there; returns whether it was added."""
        normal = normalise(text)
        if normal in self._exact:
            return False
        found = shingles(normal)
        sketch = sorted(found)[:_SKETCH]
        shared: Counter[int] = Counter()
        for value in sketch:
            holders = self._holders[value]
            if len(holders) <= _COMMON_HASH:
                shared.update(holders)
        fewest = min(_FEWEST_SHARED, len(sketch))
        for other, count in shared.items():
            if count >= fewest and _jaccard(found, self._shingles[other]) >= ALIKE:
                return False
        self._exact.add(normal)
        for value in sketch:
            self._holders[value].append(len(self._shingles))
        self._shingles.append(found)
        return True


def _jaccard(first: frozenset[int], second: frozenset[int]) -> float:
    both = len(first & second)
    return both / (len(first) + len(second) - both)


class ExcludedTexts:
    """
    Texts that must not be trained on.

    A text is one of them if it is the same once normalised, or holds most of one, or is held by one; phrases that
    several of them share (an instruction put behind every question, say) do not count.

    Args:
        texts (`Iterable[str]`): The texts.
    """

    def __init__(self, texts: Iterable[str]):
        normal = sorted(set(map(normalise, texts)))
        self._exact = set(normal)
        every = list(map(shingles, normal))
        holders = Counter(value for found in every for value in found)
        self._common = {value for value, count in holders.items() if count > _COMMON_SHINGLE}
        self._sizes: list[int] = []
        self._holders: dict[int, list[int]] = defaultdict(list)
        for found in every:
            own = found - self._common
            if len(own) >= _FEWEST_SHINGLES:
                for value in own:
                    self._holders[value].append(len(self._sizes))
                self._sizes.append(len(own))

    def __contains__(self, text: str) -> bool:
        normal = normalise(text)
        if normal in self._exact:
            return True
        own = shingles(normal) - self._common
        shared = Counter(other for value in own for other in self._holders.get(value, ()))
        for other, count in shared.items():
            held = len(own) >= _FEWEST_SHINGLES and count >= HELD * len(own)
            if held or count >= HELD * self._sizes[other]:
                return True
        return False


def repetition(text: str) -> float:
    """How much of a text repeats what it has said before: a share in [0, 1)."""
    normal = normalise(text)
    places = max(len(normal) - SHINGLE, 0) + 1
    return 1 - len(shingles(normal)) / places
