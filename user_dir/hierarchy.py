"""A world whose training text fits two rules: agree with the first noun, or with the nearest.

A document is one sentence, `noun (preposition noun)* verb .` or, with a verb that has no number,
`noun (preposition noun)* verb reflexive .`. The verb or reflexive has the number of the first noun.
Unless `ambiguous` is false, all nouns of a sentence have one number, so that the text does not
determine the rule. Minimal pairs with nouns of both numbers show which rule a model has learnt
(McCoy et al. 2020, "Does syntax need to grow on trees?").
"""

from dataclasses import dataclass

import numpy as np

from metaseq_lm.core.options import option
from metaseq_lm.core.random_streams import subkeys, uniforms
from metaseq_lm.core.registry import register_world
from metaseq_lm.data.worlds.base import NO_LABEL, NO_TOKEN, Documents, World

AGREEMENT, REFLEXIVE = 0, 1
SAME, OPPOSED = "same", "opposed"
KINDS = {"agreement": AGREEMENT, "reflexive": REFLEXIVE}
HEAD = "head_number"


@dataclass
class HierarchyConfig:
    """The size of the language, and whether its text determines the rule."""

    nouns: int = option(20, "nouns, each singular and plural", at_least=1)
    verbs: int = option(16, "verbs, each with both numbers and without one", at_least=1)
    phrases: int = option(2, "most prepositional phrases", at_least=1, at_most=8)
    ambiguous: bool = option(True, "whether all nouns of a sentence have the same number")


@register_world("hierarchy", dataclass=HierarchyConfig)
class Hierarchy(World):
    """Agreement and reflexives in text that fits the first noun and the nearest alike."""

    pair_kinds = tuple(f"{kind}_{numbers}" for kind in KINDS for numbers in (SAME, OPPOSED))

    def __init__(self, config: HierarchyConfig, seed: int = 0) -> None:
        super().__init__(config, seed)
        words = [".", "P1", "P2", "itself", "themselves"]
        self.noun = len(words)
        words += [f"noun{i}{number}" for i in range(config.nouns) for number in "sp"]
        self.verb = len(words)  # three forms: singular, plural, without number
        words += [f"verb{i}{form}" for i in range(config.verbs) for form in ("s", "p", "ed")]
        self.symbols = words
        self.longest = 2 * config.phrases + 4
        self.label_sets = {HEAD: ("singular", "plural")}

    def sample(self, keys: np.ndarray) -> Documents:
        return self._sentences(keys, opposed=None)

    def sample_labelled(self, name: str, split: str, keys: np.ndarray) -> Documents:
        """Return sentences like the text for train, and with nouns of both numbers for tests."""
        return self._sentences(keys, opposed=None if split == "train" else True)

    def _sentences(self, keys: np.ndarray, opposed: bool | None) -> Documents:
        """Return sentences with first and last noun of different number or not; None: as drawn.

        `opposed` sentences have at least one phrase.
        """
        config, count = self.config, len(keys)
        rows = np.arange(count)
        draws = uniforms(subkeys(keys, "sentence"), 0, 5 + 3 * (config.phrases + 1))
        kind = (draws[:, 0] * 2).astype(np.int64)
        least = int(bool(opposed))
        phrases = least + (draws[:, 1] * (config.phrases + 1 - least)).astype(np.int64)
        # For each noun, its number, its lexeme, and the preposition before it.
        of_nouns = draws[:, 5:].reshape(count, -1, 3)
        numbers = (of_nouns[:, :, 0] * 2).astype(np.int64)
        if config.ambiguous:
            numbers[:] = numbers[:, :1]
        if opposed is not None:
            numbers[rows, phrases] = (numbers[:, 0] + opposed) % 2
        nouns = self.noun + 2 * (of_nouns[:, :, 1] * config.nouns).astype(np.int64) + numbers
        tokens = np.full((count, self.longest), NO_TOKEN)
        for position in range(config.phrases + 1):
            present = phrases >= position
            tokens[present, 2 * position] = nouns[present, position]
            if position:
                tokens[present, 2 * position - 1] = 1 + (of_nouns[present, position, 2] * 2).astype(
                    int
                )
        head, column = numbers[:, 0], 2 * phrases + 1
        verb = self.verb + 3 * (draws[:, 2] * config.verbs).astype(np.int64)
        tokens[rows, column] = verb + np.where(kind == AGREEMENT, head, 2)
        reflexive = kind == REFLEXIVE
        tokens[rows[reflexive], column[reflexive] + 1] = 3 + head[reflexive]
        tokens[rows, column + 1 + reflexive] = 0
        labels = np.full(tokens.shape, NO_LABEL)
        labels[rows, column - 1] = head
        return Documents(tokens, {HEAD: labels})

    def log_probs(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probability of each sentence, (N, S) to (N,); -inf for other sequences.

        The probability is 1/2 for the kind, times 1/(phrases + 1), times (1/nouns)^(k+1) (1/2)^k
        1/verbs for k phrases, times 1/2 for the number of all nouns or, unless ambiguous,
        (1/2)^(k+1). The length determines kind and k.
        """
        config = self.config
        log_probs = np.full(len(tokens), -np.inf)
        lengths = (tokens != NO_TOKEN).sum(axis=1)
        is_prefix = ((tokens != NO_TOKEN) == (np.arange(tokens.shape[1]) < lengths[:, None])).all(1)
        for kind in KINDS.values():
            for k in range(config.phrases + 1):
                rows = np.flatnonzero(is_prefix & (lengths == 2 * k + 3 + kind))
                words = tokens[rows]
                nouns, preps = words[:, 0 : 2 * k + 1 : 2], words[:, 1 : 2 * k : 2]
                verbs = words[:, 2 * k + 1] - self.verb
                numbers = (nouns - self.noun) % 2
                good = ((nouns >= self.noun) & (nouns < self.verb)).all(axis=1)
                good &= ((preps == 1) | (preps == 2)).all(axis=1) & (verbs >= 0)
                good &= verbs % 3 == (numbers[:, 0] if kind == AGREEMENT else 2)
                if kind == REFLEXIVE:
                    good &= words[:, 2 * k + 2] == 3 + numbers[:, 0]
                good &= words[:, 2 * k + 2 + kind] == 0
                if config.ambiguous:
                    good &= (numbers == numbers[:, :1]).all(axis=1)
                halves = 1 + k + (1 if config.ambiguous else k + 1)
                choices = (config.phrases + 1) * config.nouns ** (k + 1) * config.verbs
                log_probs[rows[good]] = -halves * np.log(2) - np.log(choices)
        return log_probs

    def minimal_pairs(self, kind: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs in which the verb or reflexive agrees with the first noun, or does not.

        With nouns of both numbers, the bad sentence agrees with the nearest noun instead. Neither
        sentence of such a pair is possible in ambiguous text, so their exact probabilities tie.
        """
        construction, _, numbers = kind.partition("_")
        good = self._sentences(keys, opposed=numbers == OPPOSED).tokens
        lengths = (good != NO_TOKEN).sum(axis=1)
        good = good[lengths % 2 == 1 - KINDS[construction]]
        rows = np.arange(len(good))
        last = (good != NO_TOKEN).sum(axis=1) - 2  # the verb, or the reflexive
        bad = good.copy()
        first = self.verb if KINDS[construction] == AGREEMENT else 3
        offset = (good[rows, last] - first) % 3
        bad[rows, last] = good[rows, last] + 1 - 2 * offset
        return good, bad
