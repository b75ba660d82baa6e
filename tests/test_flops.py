"""FLOPs against the closed form, and that counting changes nothing."""

import json
from pathlib import Path

import torch
from battery import configure, train

from metaseq_lm.flops import FlopMeter, signature


def test_a_linear_layer_costs_what_it_should() -> None:
    """Forward 2nio; backward the same for the weight (the input needs no gradient)."""
    layer, x = torch.nn.Linear(7, 5), torch.randn(3, 7)
    meter = FlopMeter()
    for _ in range(4):
        with meter.count([x]):
            layer(x).sum().backward()
    assert meter.total == 4 * (2 * 3 * 7 * 5) * 2
    assert len(meter.known) == 1


def test_signatures_tell_shapes_apart() -> None:
    a, b = {"s": [[{"tokens": torch.ones(2, 3)}]]}, {"s": [[{"tokens": torch.ones(3, 2)}]]}
    assert signature(a) != signature(b)
    assert signature(a) == signature({"s": [[{"tokens": torch.zeros(2, 3)}]]})


def test_a_masked_lm_run_costs_what_the_sizes_say(moons: Path, tmp_path: Path) -> None:
    """16 rows of 34 tokens, 2 layers of width 8: forward by hand, backward twice that."""
    train(configure(moons, tmp_path, ("masked_lm", 0), "trainer.max_update=3", "seed=4"))
    results = json.loads((tmp_path / "results.json").read_text())
    rows, length, width, ffn, vocabulary = 16, 34, 8, 16, 407
    layer = rows * length * (3 * width * width + width * width + 2 * width * ffn)
    attention = 2 * rows * length * length * width
    least = 2 * (2 * (layer + attention) + rows * 5 * width * (width + vocabulary))
    most = 2 * (2 * (layer + attention) + rows * 6 * width * (width + vocabulary))
    # The first layer's input needs a gradient (embeddings), so backward is twice the forward.
    assert 3 * 3 * least <= results["flops"] <= 3 * 3 * most


def test_counting_changes_nothing(moons: Path, tmp_path: Path) -> None:
    """A run that counts every update equals one that counts only the first of its shape."""
    case = ("meta_pseudo_label_soft", 0)
    plain = train(configure(moons, tmp_path / "a", case, "trainer.max_update=4"))
    known = FlopMeter.count

    def always(self: FlopMeter, work: object) -> object:
        self.known.clear()
        return known(self, work)

    FlopMeter.count = always  # type: ignore[method-assign,assignment]
    try:
        counted = train(configure(moons, tmp_path / "b", case, "trainer.max_update=4"))
    finally:
        FlopMeter.count = known  # type: ignore[method-assign]
    assert all(torch.equal(plain[n], counted[n]) for n in plain)
