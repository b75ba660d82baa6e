"""What ELECTRA's criterions count is exact, although their logits are in bfloat16
under autocast.
"""

from typing import Any

import pytest
import torch
from electra_bench import FIRST, Seen, build, criterion, make_batch
from torch import Tensor, nn

ROWS, LENGTH = 173, 12  # 519 targets and 1730 candidates, which bfloat16 does not have
CASES = [
    ("electra_rtd", "mlm", ("rtd",)),
    ("electric_nce", "two_tower", ("rtd",)),
    ("two_tower_cloze", "two_tower", ()),
    ("replace_mlm", "mlm", ("lm",)),
    ("all_tokens_mlm", "mlm", ("lm", "copy")),
    ("electra_adversarial", "mlm", ("rtd", "baseline")),
    ("strategic_mlm", "difficulty", ("lm",)),
]
SHARES = ("accuracy", "fakes", "flagged", "caught", "candidates")
COUNTS = ("generator_accuracy", "sample_accuracy", *SHARES)


def in_float32(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    """Give a head's very bfloat16 numbers in another precision."""
    return output.float()


@pytest.mark.parametrize("name, kind, heads", CASES, ids=[name for name, _, _ in CASES])
def test_counts_are_those_of_the_same_logits_in_float32(name: str, kind: str, heads: tuple) -> None:
    model = build(heads, noise=kind).float()
    batch = make_batch((LENGTH,) * ROWS, [[1, 3, 6]] * ROWS)
    # One word everywhere: heads that predict it are right all the time.
    for tokens in (batch.tokens, batch.masked):
        tokens.masked_fill_(batch.candidates & (tokens >= FIRST), FIRST)
    batch.targets.fill_(FIRST)
    with torch.no_grad():
        for part in [h for n, h in model.heads.items() if n == "lm"] or [model.generator.head]:
            if "rtd" not in heads:
                part.bias[FIRST] += 100
    terms = []
    with torch.autocast("cpu", torch.bfloat16):
        terms.append(Seen(model, criterion(name), batch).terms)
        for head in (*model.heads.values(), model.generator.head):
            head.register_forward_hook(in_float32)
        seen = Seen(model, criterion(name), batch)
        terms.append(seen.terms)
    low, high = terms
    names = [n for n in (*COUNTS, "copied") if n in low]
    found = {n: low[n].sum.item() for n in names}
    assert found == {n: high[n].sum.item() for n in names}
    # At least one of them is no number that bfloat16 has, or nothing would be tested.
    assert any(value != torch.tensor(value).bfloat16().item() for value in found.values())
    if "fakes" in found:
        changed = int((seen.tokens != batch.tokens).sum())
        assert found["fakes"] == (3 * ROWS if name == "electric_nce" else changed)
        assert found["candidates"] == 10 * ROWS
    elif name != "all_tokens_mlm":
        assert found["accuracy"] == (3 if heads else 10) * ROWS
