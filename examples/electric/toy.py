"""Electric and ELECTRA on a Markov chain whose conditionals p(x_t | all others) are known exactly.

  python toy.py OUT            all parts, three seeds: ten minutes on one core
  python toy.py OUT --quick    one seed, 550 updates
  python toy.py OUT --exact    without the Transformers: seconds

(a) A table of energies under the naive estimator (Clark 2021, algorithm 1) against -log p.
(b) The same table under the efficient one (algorithm 2): its bias from replaced neighbours.
(c) The best ELECTRA discriminator, tabulated, and three ways to read probabilities from it.
(d) A small Transformer under both estimators, with two towers trained alongside as the noise.

Prints tables and writes OUT/toy.json and OUT/toy.png.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from chain import (
    Chain,
    best_with_context_noise,
    correlation,
    efficient,
    electra_logit,
    inversions,
    judge,
    minimise,
    naive,
    naive_sample,
)
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm import plugins
from metaseq_lm.cli import main as command
from metaseq_lm.core.batch import Term, Terms, TokenBatch
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.registry import register_criterion
from metaseq_lm.methods.electra.criterion import Electric, cloze_term, noise_log_probs
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.methods.electra.model import TwoTowers, sample
from metaseq_lm.methods.electra.options import ElectricConfig
from metaseq_lm.models.transformer.encoder import select
from metaseq_lm.training.run import TrainingRun

REPLACED = 2  # of the tokens of a row, and noise samples of the naive estimator
BLUR = 0.3  # the share of the uniform distribution in the noise of (a) and (b)
HELD_OUT = 400
TARGETS = 60  # held-out rows whose target under context noise is computed
NAMES = "abcdefghijklmnopqrstuvwxyz"
MODEL = [
    "model.encoder_layers=2",
    "model.encoder_embed_dim=64",
    "model.encoder_ffn_embed_dim=256",
    "model.encoder_attention_heads=16",
    "model.generator_size=0.5",
    "model.generator_layers=0.5",
    "model.noise=two_tower",
    "model.sharing=none",
    "model.dropout=0",
    "model.attention_dropout=0",
]
TRAINING = [
    "task.batch_size=64",
    "task.sample_break_mode=eos",
    "criterion.discriminator_weight=1",
    "optimizer.lr=0.002",
    "optimizer.clip_norm=0",
    "optimizer.weight_decay=0",
    "schedule=linear",
    "schedule.warmup_updates=100",
    "trainer.valid_split=''",
    "trainer.save_interval_updates=0",
    "trainer.log_interval=500",
    "engine.tensorboard=false",
    "engine.threads=1",
    "engine.device=cpu",
]


@register_criterion("electric_naive", dataclass=ElectricConfig)
class NaiveElectric(Electric):
    """Algorithm 1 of Clark 2021, section 5.1.4: every noise token stands alone in a row of its own.

    P(noise) = sigmoid(E + log q + log(k / n)): all n tokens of the original row are data, k tokens
    are noise, which takes k passes more.
    """

    def __call__(self, model: nn.Module, batch: ElectraBatch) -> Terms:
        net: Any = model
        tokens, positions = batch.tokens, batch.positions
        log_probs = noise_log_probs(net, batch)
        slots = select(log_probs, positions).detach()
        samples = sample(slots)  # (B, M)
        log_q = log_probs.detach().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        constant = math.log(positions.shape[1] / (tokens.shape[1] - 2))
        # The original row and, in one pass with it, one row for each noise token: (B, 1 + M, S).
        alone = tokens.unsqueeze(1).repeat(1, positions.shape[1], 1)
        alone = alone.scatter(2, positions.unsqueeze(-1), samples.unsqueeze(-1))
        rows = torch.cat([tokens.unsqueeze(1), alone], 1)
        every = rows.flatten(0, 1)
        energy = net.heads["rtd"](net.hidden(every, TokenBatch(tokens=every))).view(rows.shape)
        data = energy[:, 0] + log_q + constant
        own = energy[:, 1:].gather(-1, positions.unsqueeze(-1)).squeeze(-1)
        noise = own + slots.gather(-1, samples.unsqueeze(-1)).squeeze(-1) + constant
        loss = (F.softplus(data) * batch.candidates).sum() + F.softplus(-noise).sum()
        return {
            "generator": cloze_term(log_probs, batch, self.config.generator_weight),
            "discriminator": Term(loss, "candidates", self.config.discriminator_weight),
        }


# ---------------------------------------------------------------- tables


def table_part(chain: Chain) -> dict[str, dict[str, float]]:
    """Return what the table of energies becomes under each estimator."""
    q = chain.blurred(BLUR)
    tasks = {
        "naive, expected": naive(chain, q, REPLACED),
        "naive, 100,000 rows": naive_sample(chain, q, REPLACED, 100_000, 3),
        "efficient, 1 of n": efficient(chain, q, 1),
        f"efficient, {REPLACED} of n": efficient(chain, q, REPLACED),
        f"efficient, {REPLACED} of n, q = p": efficient(chain, chain.p, REPLACED),
        f"efficient, {REPLACED} of n, q uniform": efficient(chain, chain.blurred(1), REPLACED),
    }
    return {name: judge(minimise(task, chain), chain) for name, task in tasks.items()}


def discriminator_part(chain: Chain, rate: float) -> dict[str, Any]:
    """Return the mean error of log p by each formula with the optimal ELECTRA discriminator."""
    p, q, weight = chain.p, chain.blurred(BLUR), chain.triples().transpose(0, 2, 1)
    read = inversions(electra_logit(p, q, rate), q, rate)
    errors = {name: float((weight * abs(v - np.log(p))).sum()) for name, v in read.items()}
    points = {}
    for one, other in ((0.3, 0.2), (0.9, 0.7)):
        few = inversions(electra_logit(np.array(one), np.array(other), 0.15), np.array(other), 0.15)
        points[f"p={one} q={other}"] = {name: float(np.exp(v)) for name, v in few.items()}
    return {"error": errors, "points": points}


# ---------------------------------------------------------------- Transformers


def text_of(rows: np.ndarray) -> str:
    """Return one line per row, a letter a symbol."""
    return "".join(" ".join(NAMES[x] for x in row) + "\n" for row in rows)


def binarise(chain: Chain, folder: Path, count: int) -> Path:
    """Write `count` rows of the chain and binarise them."""
    (folder / "train.txt").write_text(text_of(chain.draw(count, 7)), encoding="utf-8")
    text = ["--trainpref", str(folder / "train.txt"), "--tokenizer", "word"]
    if command(["preprocess", *text, "--destdir", str(folder / "data")]):
        raise SystemExit("preprocess failed")
    return folder / "data"


@torch.no_grad()
def energies(run: TrainingRun, chain: Chain, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return E (count, n, V) of all symbols at all positions of clean rows, and log q."""
    vocabulary, model = run.task.vocabulary, run.model.eval()  # type: ignore[attr-defined]
    net: Any = model
    ids = torch.tensor([vocabulary.index(NAMES[v]) for v in range(chain.symbols)])
    first, last = torch.tensor([vocabulary.cls(0)]), torch.tensor([vocabulary.sep])
    every, log_q = [], []
    for row in torch.from_numpy(rows):
        tokens = torch.cat([first, ids[row], last])
        many = tokens.repeat(chain.length, chain.symbols, 1)
        for t in range(chain.length):
            many[t, :, t + 1] = ids
        flat = TokenBatch(tokens=many.flatten(0, 1))
        logits: Tensor = net.heads["rtd"](net.hidden(flat.tokens, flat))
        logits = logits.view(chain.length, chain.symbols, -1)
        every.append(torch.stack([logits[t, :, t + 1] for t in range(chain.length)]))
        if isinstance(net.generator, TwoTowers):
            q = net.cloze_noise(TokenBatch(tokens=tokens[None])).log_softmax(-1)[0, 1:-1]
        else:
            q = net.generator.log_probs.expand(chain.length, -1)
        log_q.append(q[:, ids])
    return torch.stack(every).double().numpy(), torch.stack(log_q).double().numpy()


def train(
    name: str, data: Path, save: Path, seed: int, length: int, options: list[str]
) -> TrainingRun:
    """Train one Transformer and return its run."""
    rate = f"task.mask_prob={REPLACED / length}"
    sizes = [f"task.tokens_per_sample={length + 2}", f"model.max_positions={length + 2}", rate]
    places = [f"data={data}", f"save_dir={save}", f"seed={seed}"]
    names = ["task=electra", "model=electra", f"criterion={name}"]
    run = TrainingRun(load_config([*names, *MODEL, *TRAINING, *sizes, *places, *options]))
    run.train()
    return run


def measure(
    energy: np.ndarray, log_q: np.ndarray, chain: Chain, rows: np.ndarray, target: np.ndarray
) -> dict[str, float]:
    """Compare E of the tokens that stand in the held-out rows with -log p, and with a `target`."""
    own = np.take_along_axis(energy, rows[..., None], -1)[..., 0]
    wanted = -chain.log_p(rows)
    left, right = chain.contexts(rows)
    p = chain.p[left, right]
    some = own[: len(target)]
    return {
        "error": float(abs(own - wanted).mean()),
        "bias": float((own - wanted).mean()),
        "correlation": correlation(own, wanted),
        "Z": float(np.exp(-energy).sum(-1).mean()),
        "Z_sd": float(np.exp(-energy).sum(-1).std()),
        "target_error": float(abs(some - target).mean()),
        "target_correlation": correlation(some, target),
        "noise_KL": float((p * (np.log(p) - log_q)).sum(-1).mean()),
    }


def transformer_part(
    chain: Chain, seeds: int, updates: int, options: list[str]
) -> tuple[dict[str, list[dict[str, float]]], dict[str, Any]]:
    """Return the measures of each estimator by seed, and the points of the first seed's picture."""
    plugins.load_all()
    rows = chain.draw(HELD_OUT, 9)
    targets = {
        "electric_naive": -chain.log_p(rows[:TARGETS]),
        "electric_nce": best_with_context_noise(chain, REPLACED, rows[:TARGETS]),
    }
    more = [f"trainer.max_update={updates}", f"schedule.total_updates={updates}", *options]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in targets}
    points: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = binarise(chain, Path(scratch), 60_000)
        for seed in range(1, seeds + 1):
            for name, target in targets.items():
                began = time.monotonic()
                save = Path(scratch) / f"{name}-{seed}"
                run = train(name, data, save, seed, chain.length, more)
                energy, log_q = energies(run, chain, rows)
                found = measure(energy, log_q, chain, rows, target)
                found["seconds"] = round(time.monotonic() - began, 1)
                results[name].append(found)
                print(f"  {name} seed {seed}", row_of(found), flush=True)
                if seed == 1:
                    points[name] = np.take_along_axis(energy, rows[..., None], -1)[..., 0]
    bias = targets["electric_nce"] + chain.log_p(rows[:TARGETS])
    about = {
        "energy": points,
        "wanted": -chain.log_p(rows),
        "target": targets["electric_nce"],
        "target_bias": float(bias.mean()),
        "target_distance": float(abs(bias).mean()),
    }
    return results, about


# ---------------------------------------------------------------- output


def row_of(values: dict[str, float]) -> str:
    """Return one line of a table."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def averages(runs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation over seeds of each measure."""
    return {
        name: {
            "mean": float(np.mean([r[name] for r in runs])),
            "sd": float(np.std([r[name] for r in runs], ddof=1)) if len(runs) > 1 else 0.0,
        }
        for name in runs[0]
    }


def draw(path: Path, about: dict[str, Any]) -> None:
    """Draw energies of held-out tokens against -log p, and the target under context noise."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharex=True, sharey=True)
    wanted = about["wanted"]
    shown = [
        ("naive (algorithm 1)", about["energy"]["electric_naive"]),
        ("efficient (algorithm 2)", about["energy"]["electric_nce"]),
        ("exact aim of algorithm 2", about["target"]),
    ]
    for axis, (title, energy) in zip(axes, shown):
        axis.scatter(wanted[: len(energy)], energy, s=3, alpha=0.4, linewidths=0)
        axis.plot([0, wanted.max()], [0, wanted.max()], color="black", linewidth=0.8)
        axis.set(title=title, xlabel="-log p(token | others)")
    axes[0].set_ylabel("energy")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for toy.json and toy.png")
    parser.add_argument("--quick", action="store_true", help="one seed, 550 updates")
    parser.add_argument("--exact", action="store_true", help="no Transformers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=2500)
    parser.add_argument("--symbols", type=int, default=4)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("override", nargs="*", help="options of the Transformers' training")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.updates = 1, 550
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    chain = Chain(options.symbols, options.length, sharpness=1.5)
    report: dict[str, Any] = {"table": table_part(chain)}
    print("(a), (b) a table of energies against -log p")
    for name, values in report["table"].items():
        print(f"  {name:32s}{row_of(values)}")
    report["discriminator"] = discriminator_part(chain, REPLACED / chain.length)
    print("(c) log p from the best ELECTRA discriminator")
    print("  mean error in nats:", row_of(report["discriminator"]["error"]))
    for name, values in report["discriminator"]["points"].items():
        print(f"  {name}:", row_of(values))
    if not options.exact:
        print(f"(d) Transformers, {options.updates} updates")
        runs, about = transformer_part(chain, options.seeds, options.updates, options.override)
        report["transformer"] = {
            name: {"runs": values, **averages(values)} for name, values in runs.items()
        }
        report["aim"] = {n: about[n] for n in ("target_bias", "target_distance")}
        for name, values in runs.items():
            shown = averages(values).items()
            print(f"  {name}: " + "  ".join(f"{n} {v['mean']:.3f}±{v['sd']:.3f}" for n, v in shown))
        print("  aim of the efficient estimator against -log p:", row_of(report["aim"]))
        draw(options.out / "toy.png", about)
    (options.out / "toy.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
