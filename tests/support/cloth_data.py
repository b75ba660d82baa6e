"""Generated passages of CLOTH: ascending numbers with blanks, and candidates for each blank."""

import json
import random
from pathlib import Path
from typing import Any


def passage(draw: random.Random, level: str, words: int = 20) -> dict[str, Any]:
    """Return ascending numbers with two blanks and four candidates, one right, for each blank."""
    numbers = [str(number) for number in range(words)]
    options, answers = [], []
    for place in sorted(draw.sample(range(1, words), 2)):
        candidates = draw.sample([n for n in map(str, range(64)) if n != numbers[place]], 4)
        answer = draw.randrange(4)
        candidates[answer] = str(place)
        numbers[place] = " _ "
        options.append(candidates)
        answers.append("ABCD"[answer])
    article = " ".join(numbers)
    return {"article": article, "options": options, "answers": answers, "source": f"{level}1.json"}


def write(folder: Path, passages: int = 10) -> Path:
    """Write train.jsonl, valid.jsonl and test.jsonl; return the folder.

    Each file has equal numbers of passages of both levels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        draw = random.Random(split)
        rows = [passage(draw, ("middle", "high")[n % 2]) for n in range(passages)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(folder: Path, data: Path, name: str = "CLOTH") -> list[str]:
    """Return the command that makes DATA/NAME from the files in a folder."""
    return ["preprocess", f"--benchmark=cloth/{name}", f"--source={folder}", f"--destdir={data}"]
