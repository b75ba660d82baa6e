"""Draw the pictures of docs/objectives: who sees whom, and what is predicted.

usage: python docs/objective_pictures.py

objective_views.py says what they show. The pictures go to docs/objectives/pictures, and their texts
into the pages. The weights of the model are 0, so that nothing depends on the processor; samples of
a noise model are then uniform.
"""

import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from objective_catalogue import CATALOGUE, Objective, Picture
from objective_views import View, make_data, open_runs, views

from metaseq_lm import plugins

HERE = Path(__file__).resolve().parent
PAGES = HERE / "objectives"
WIDTH, LEFT, RIGHT = 400, 80, 84
GAP = 6  # between the keys of an encoder and those of a decoder
WIDE = "#<>M"  # letters
LONGEST_LINE = 54  # letters of a line of options
STYLE = """
      .card { fill: #ffffff }
      .seen { fill: #b3bce8 } .used { fill: #5c6bc0 } .hidden { fill: #eceff4 }
      .mark { fill: #ffe0a3 }
      text { font-size: 13px; fill: #263238 }
      .title { font-weight: bold; fill: #283593 } .side { fill: #607d8b; font-size: 12px }
      .target { font-weight: bold; fill: #00695c }
      @media (prefers-color-scheme: dark) {
        .card { fill: #1e2129 }
        .seen { fill: #4a5596 } .used { fill: #9fa8da } .hidden { fill: #2b303b }
        .mark { fill: #7a5200 }
        text { fill: #e0e3f0 }
        .title { fill: #c5cae9 } .side { fill: #a7b4bd }
        .target { fill: #80cbc4 }
      }
"""


def draw(shown: list[View], options: tuple[str, ...]) -> str:
    """Return the SVG of some views, and of the options that made them."""
    parts, top = [], 8.0
    for item in shown:
        drawn, top = draw_view(item, top)
        parts += drawn
    drawn, top = legend(top + 4, has_marks=any(item.marked.any() for item in shown))
    parts += drawn
    for line in textwrap.wrap(
        " ".join(options).replace('","', '", "'), LONGEST_LINE, break_long_words=False
    ):
        parts.append(text(8, top + 8, line, "side", anchor=None, size=11))
        top += 16
    top += 4
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="480" '
        'font-family="Helvetica, Arial, sans-serif" role="img" aria-labelledby="title">\n'
        f'  <title id="title">{escape(described(shown))}</title>\n'
        f"  <style>{STYLE}  </style>\n"
        f'  <rect class="card" width="{WIDTH}" height="{top:.0f}" rx="8"/>\n  {body}\n</svg>\n'
    )


def draw_view(item: View, top: float) -> tuple[list[str], float]:
    """Return the elements of a panel that begins at `top`, and where it ends."""
    first = len(item.keys) - len(item.queries)  # of the keys that are queries, too
    gap = GAP * (first > 0)
    cell = min(24.0, (WIDTH - LEFT - RIGHT - gap) / len(item.keys))
    columns = [LEFT + cell * at + gap * (at >= first) for at in range(len(item.keys))]
    grid = top + 34 + max(map(width_of, item.keys))
    right = columns[-1] + cell + 8
    parts = [
        text(8, top + 18, item.title, "title", anchor=None),
        text(LEFT - 8, grid - 22, "key →", "side"),
        text(LEFT - 8, grid - 7, "query ↓", "side"),
        text(right, grid - 7, "predicts", "side", anchor=None),
    ]
    for left, key, is_marked in zip(columns, item.keys, item.marked.tolist()):
        middle, length = left + cell / 2, width_of(key) + 4
        if is_marked:
            parts.append(box("mark", middle - 8, grid - length - 4, 16, length))
        parts.append(text(middle + 4.5, grid - 6, key, anchor=None, turned=True))
    for number, query in enumerate(item.queries):
        y = grid + cell * number
        baseline, length = y + cell / 2 + 4.5, width_of(query) + 4
        if item.marked[first + number]:
            parts.append(box("mark", LEFT - 6 - length, y + cell / 2 - 8, length, 16))
        parts.append(text(LEFT - 8, baseline, query))
        kind = "used" if number in item.targets else "seen"
        for left, is_seen in zip(columns, item.seen[number].tolist()):
            style = kind if is_seen else "hidden"
            parts.append(box(style, left + 0.5, y + 0.5, cell - 1, cell - 1, 2))
        if number in item.targets:
            parts.append(text(right, baseline, item.targets[number], "target", anchor=None))
    return parts, grid + cell * len(item.queries) + 10


def width_of(word: str) -> float:
    """Return the width of a word, at most, in a usual font."""
    return sum(11.0 if letter in WIDE else 7.4 for letter in word)


def legend(top: float, has_marks: bool) -> tuple[list[str], float]:
    """Return the elements that explain the colours, and where they end."""
    entries = [
        ("used", LEFT, "seen, for a prediction"),
        ("seen", LEFT + 152, "seen"),
        ("hidden", LEFT + 212, "not seen"),
    ]
    if has_marks:
        entries.append(("mark", LEFT, "masked, replaced, or a sentinel"))
    parts = []
    for number, (style, x, words) in enumerate(entries):
        y = top + 19 * (number == 3)
        parts.append(box(style, x, y + 1, 12, 12, 2))
        parts.append(text(x + 17, y + 11, words, "side", anchor=None))
    return parts, top + 22 + 19 * has_marks


def box(style: str, x: float, y: float, width: float, height: float, radius: float = 3) -> str:
    """Return a rectangle."""
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="{radius:g}"/>'
    )


def text(
    x: float,
    y: float,
    words: str,
    style: str = "",
    anchor: str | None = "end",
    turned: bool = False,
    size: int = 0,
) -> str:
    """Return words whose baseline ends at (x, y), or begins there without an anchor."""
    attributes = {
        "class": style,
        "x": f"{x:.1f}",
        "y": f"{y:.1f}",
        "text-anchor": anchor or "",
        "transform": f"rotate(-90 {x:.1f} {y:.1f})" if turned else "",
        "style": f"font-size: {size}px" if size else "",
    }
    written = " ".join(f'{key}="{value}"' for key, value in attributes.items() if value)
    return f"<text {written}>{escape(words)}</text>"


def described(shown: list[View]) -> str:
    """Return in words what views show: for those who do not see the picture."""
    parts = []
    for item in shown:
        words = " ".join(item.queries)
        counts = sorted({int(count) for count in item.seen.sum(1)})
        seen = f"each sees {counts[0]}" if len(counts) == 1 else f"they see {listed(counts)}"
        aims = [f"{item.queries[n]} → {target}" for n, target in sorted(item.targets.items())]
        predicted = f"; predictions: {', '.join(aims)}" if aims else ""
        parts.append(
            f"{item.title}: {len(item.queries)} queries, {words}; {seen} of "
            f"{len(item.keys)} keys{predicted}"
        )
    return ". ".join(parts).replace("[", "").replace("]", "")


def listed(counts: list[int]) -> str:
    """Return numbers as a range if there are no gaps, else one by one."""
    if counts == list(range(counts[0], counts[-1] + 1)) and len(counts) > 2:
        return f"{counts[0]} to {counts[-1]}"
    return " or ".join(map(str, counts))


# ------------------------------------------------------------------------------- files


def drawn_pictures(folder: Path) -> Iterator[tuple[Objective, Picture, str, str]]:
    """Yield each picture of the catalogue, its SVG and its text; `folder` is for data."""
    data = make_data(folder)
    for objective in CATALOGUE:
        for picture in objective.pictures:
            runs = open_runs(objective, picture, data[picture.corpus])
            with torch.no_grad():
                for parameter in runs[0].model.parameters():
                    parameter.zero_()
                shown = views(runs, picture)
            yield objective, picture, draw(shown, picture.options), described(shown)


def with_text(page: str, picture: str, words: str) -> str:
    """Return a page in which the text of a picture is `words`."""
    image = re.compile(rf"!\[[^\]\n]*\]\(pictures/{picture}\.svg\)")
    return image.sub(lambda _: f"![{words}](pictures/{picture}.svg)", page)


def main() -> None:
    """Write all pictures, and their texts into the pages."""
    plugins.load_all(str(HERE.parent / "user_dir"))
    (PAGES / "pictures").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for objective, picture, svg, words in drawn_pictures(Path(folder)):
            (PAGES / "pictures" / f"{picture.name}.svg").write_text(svg, encoding="utf-8")
            page = PAGES / f"{objective.name}.md"
            if page.exists():
                changed = with_text(page.read_text(encoding="utf-8"), picture.name, words)
                page.write_text(changed, encoding="utf-8")
            print(f"{picture.name}: {words}")


if __name__ == "__main__":
    main()
