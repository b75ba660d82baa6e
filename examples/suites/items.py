"""Small made-up suites in the official forms: `python examples/suites/items.py FOLDER`.

Writes the folders blimp, comps, ewok and entity_tracking, for comparisons between programs: the
texts have several tokens a word, letters of several bytes, and punctuation, and of some items all
models make a tie.
"""

import json
import sys
from itertools import product
from pathlib import Path

Item = dict[str, object]
ANIMALS = ("cat", "naïve dog", "jackdaw", "Señor's horse")
THINGS = ("clock", "crème brûlée", "bone", "well-known map")
PLACES = ("harbour", "café", "library")


def pairs() -> list[Item]:
    """Return minimal pairs of number, the last of every twelve with two equal sentences."""
    fields = {"field": "morphology", "linguistics_term": "agreement", "UID": "number"}
    items: list[Item] = []
    for animal, place, verb in product(ANIMALS, PLACES, ("sleep", "exist")):
        good = f"The {animal} {verb}s near the {place}."
        bad = good if len(items) % 12 == 11 else good.replace(f"{verb}s", verb)
        items.append({"sentence_good": good, "sentence_bad": bad, **fields})
    return items


def properties() -> list[Item]:
    """Return items of COMPS, the last of every twelve with the same concept twice."""
    items: list[Item] = []
    for animal, thing, phrase in product(ANIMALS, THINGS, ("can breathe.", "has a beating heart.")):
        other = animal if len(items) % 12 == 11 else thing
        prefixes = {"prefix_acceptable": f"A {animal}", "prefix_unacceptable": f"A {other}"}
        items.append({**prefixes, "property_phrase": phrase})
    return items


def knowledge() -> list[Item]:
    """Return items of EWoK, the last of every twelve with the same target twice."""
    about = dict.fromkeys(("ContextType", "ContextDiff", "TargetDiff"), "made up")
    items: list[Item] = []
    for animal, thing, place in product(ANIMALS, THINGS, PLACES):
        near, far = (f"The {animal} is {word} the {thing}." for word in ("close to", "far from"))
        target, other = f"It can touch it in the {place}.", f"It sees no {thing} there."
        other = target if len(items) % 12 == 11 else other
        texts = {"Context1": near, "Context2": far, "Target1": target, "Target2": other}
        items.append({"Domain": "spatial-relations", **about, **texts})
    return items


def states() -> list[Item]:
    """Return items of entity tracking, with two equal options where both things are the same."""
    items: list[Item] = []
    for first, second, number in product(THINGS, THINGS, (0, 1, 2)):
        moves = f"Move the contents of Box 0 to Box 1, {number} times. " * bool(number)
        before = f"Box 0 contains the {first}, Box 1 contains nothing. {moves}Box {number} contains"
        options = [f" the {first}.", f" the {second}.", " nothing at all, it is an empty box."]
        items.append({"input_prefix": before, "options": options, "numops": number})
    return items


FILES = {
    "blimp/number.jsonl": pairs,
    "comps/comps_base.jsonl": properties,
    "ewok/spatial-relations.jsonl": knowledge,
    "entity_tracking/regular.jsonl": states,
}


def write(folder: Path) -> None:
    """Write the suites into a folder."""
    for name, items in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(item, ensure_ascii=False) for item in items()]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
