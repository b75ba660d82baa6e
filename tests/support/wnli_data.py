"""Generated WNLI: the predicate determines which of two nouns "it" refers to."""

import random
from pathlib import Path

ANIMALS = "cat dog hen fox owl".split()
THINGS = "cup box pen key jar".split()
SAID = {"asleep": ANIMALS, "hungry": ANIMALS, "broken": THINGS, "empty": THINGS}
# A sentence that no rule can align, and a sentence of another kind.
STRANGE = [("It rains.", "The weather is bad.", 1), ("Ann slept, so she sat.", "Ann sat.", 0)]


def rows(seed: str, sentences: int) -> list[tuple[str, str, int]]:
    """Return sentence, hypothesis and label: two rows for each sentence."""
    draw, found = random.Random(seed), []
    for _ in range(sentences):
        pair = [draw.choice(ANIMALS), draw.choice(THINGS)]
        draw.shuffle(pair)
        said = draw.choice(list(SAID))
        sentence = f"The {pair[0]} is near the {pair[1]} because it is {said}."
        for noun in pair:
            found.append((sentence, f"The {noun} is {said}.", int(noun in SAID[said])))
    return found


def write(folder: Path, sentences: int, strange: bool = True) -> Path:
    """Write official files; dev and test have a third of the sentences of train."""
    folder.mkdir()
    for name, count in (("train", sentences), ("dev", sentences // 3), ("test", sentences // 3)):
        given = rows(name, count) + (STRANGE if strange else [])
        lines = ["index\tsentence1\tsentence2" + ("" if name == "test" else "\tlabel")]
        for number, (first, second, label) in enumerate(given):
            lines.append(f"{number}\t{first}\t{second}" + ("" if name == "test" else f"\t{label}"))
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def arguments(source: Path, data: Path) -> list[str]:
    """Return the command that makes the set."""
    return [
        "preprocess",
        "--benchmark",
        "glue/WNLI",
        "--source",
        f"{source}",
        "--destdir",
        f"{data}",
    ]
