"""The pages of docs/objectives, and the tables that are computed for them."""

import re

import pytest
import yaml
from markdown_blocks import ROOT
from objective_catalogue import CATALOGUE
from objective_tables import LEAGUE, PAGES, defaults, flops_per_token, index, world_symbols

from metaseq_lm.data.tokenizers.vocabulary import special_symbols

BY_NAME = {objective.name: objective for objective in CATALOGUE}
LENGTH = 40  # tokens of a row of the laptop division


def test_pages_are_those_of_the_catalogue():
    """Each once in the navigation, with its tables and pictures, and no others."""
    pages = {page.stem for page in PAGES.glob("*.md")} - {"index"}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert pages == set(BY_NAME) == set(re.findall(r"objectives/(\w+)\.md", navigation)) - {"index"}
    for objective in CATALOGUE:
        page = (PAGES / f"{objective.name}.md").read_text(encoding="utf-8")
        for table in ("defaults", "cost"):
            assert page.count(f"<!-- {table}: {objective.name} -->") == 1, objective.name
        names = re.findall(r"\]\(pictures/(\w+)\.svg\)", page)
        assert names == [picture.name for picture in objective.pictures]
        sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
        assert sections[-4:] == ["Defaults", "Source", "Cost", "Scores"], objective.name
        assert "`loss = " in page or "The loss is" in page, objective.name
        assert "```bash\nmetaseq-lm " in page, objective.name


def test_index_has_a_sentence_and_the_cost_of_each(tmp_path):
    rows = index(tmp_path).splitlines()[2:]
    assert len(rows) == len(CATALOGUE)
    for objective, row in zip(CATALOGUE, rows):
        link, sentence, options, flops = re.split(r" \| ", row.strip("| "))
        assert link.endswith(f"({objective.name}.md)") and "`criterion=" in options
        assert re.fullmatch(r"[^.]+\.", sentence), objective.name
        assert bool(flops) == bool(objective.costs)


def test_the_index_says_the_sizes_of_the_laptop_division():
    plan = yaml.safe_load(LEAGUE.read_text(encoding="utf-8"))
    sizes = dict(re.findall(r"(?:model|task)\.(\w+)=(\d+)$", "\n".join(plan["options"]), re.M))
    symbols = len(special_symbols(plan["data"]["task_tokens"], unk=True)) + len(world_symbols())
    page = (PAGES / "index.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"\b([NhILV]) = (\d+)\b", page))
    assert said == {
        "N": sizes["encoder_layers"],
        "h": sizes["encoder_embed_dim"],
        "I": sizes["encoder_ffn_embed_dim"],
        "L": sizes["tokens_per_sample"],
        "V": str(symbols),
    }


@pytest.mark.parametrize(
    "name, setting, share",
    [
        ("causal_lm", "defaults", 1.0),
        ("prefix_lm", "defaults", 0.5),
        ("masked_lm", "15 %", 0.15),
        ("masked_lm", "30 % falling to 15 %", 0.225),
        ("masked_lm", "30, 15, 5 % by phases", 0.8 * 0.3 + 0.15 * 0.15 + 0.05 * 0.05),
        ("masked_next_token", "15 %", 0.15 * 38 / LENGTH),
        ("gpt_bert", "1/16 causal, 15 %", 1 / 8 + 7 / 8 * 0.15 * 38 / LENGTH),
        ("masked_diffusion", "diffusion", 0.5 * 38 / LENGTH),
        ("masked_diffusion", "1/2 causal", 1 / 2 + 38 / 4 / LENGTH),
        ("mixture", "1/4 causal, 3/4 masked", 1 / 4 + 3 / 4 * 0.15),
        ("mixture", "causal, then masked", 1 / 4 + 3 / 4 * 0.15),
        ("mixture", "4 causal, 16 masked, 4 causal", 1 / 3 + 2 / 3 * 0.15),
    ],
)
def test_costs_are_those_of_the_rule_on_the_page(name, setting, share, tmp_path):
    """3 (2N (4h^2 + 3hI) + 4hLN + s (2h^2 + 2hV)) with the s of the page."""
    layers, width, inner, symbols = 2, 64, 96, 107
    body = 2 * layers * (4 * width**2 + 3 * width * inner) + 4 * width * LENGTH * layers
    expected = 3 * (body + share * (2 * width**2 + 2 * width * symbols))
    flops = flops_per_token(BY_NAME[name], BY_NAME[name].costs[setting], tmp_path)
    assert flops == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("objective", CATALOGUE, ids=list(BY_NAME))
def test_defaults_are_those_of_the_options(objective):
    """Those of the task that the objective has, in the order of the catalogue."""
    rows = dict(re.findall(r"^\| \[?`([\w.]+)`\S* \| `(.*?)` \|", defaults(objective), re.M))
    assert list(rows) == list(objective.keys)
    expected = {
        "masked_lm": ("task.leave_unmasked_prob", "0.1"),
        "replaced_tokens": ("task.leave_unmasked_prob", "0.15"),
        "span_corruption": ("task.denoisers", "[]"),
        "electric": ("criterion.discriminator_weight", "50.0"),
    }
    if objective.name in expected:
        key, value = expected[objective.name]
        assert rows[key] == value
    if objective.name == "ul2":
        assert rows["task.denoisers"].count(":") == 13
