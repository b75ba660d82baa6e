"""Comparing texts of answers as SQuAD does (Rajpurkar et al. 2016): normalised, whole or by word."""

import re
import string
from collections import Counter

PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation, articles and spare white space."""
    plain = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(gold: str, predicted: str) -> float:
    """Return 1 if the two are the same once normalised, else 0."""
    return float(normalized(predicted) == normalized(gold))


def token_f1(gold: str, predicted: str) -> float:
    """Return the F1 of the words both have, counted as often as they occur; 0 if there are none."""
    ours, theirs = normalized(predicted).split(), normalized(gold).split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0
