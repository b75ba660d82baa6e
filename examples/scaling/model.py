"""Memory, bytes and time of an update of a large model on 8, 64 and 1024 devices, by placement.

    python examples/scaling/model.py examples/scaling/measured.jsonl    # this machine
    python examples/scaling/model.py --assume h200                      # a data sheet
    python examples/scaling/model.py --check examples/scaling/memory.jsonl

The model is built of tensors without memory. `Plan` has all the formulas: P parameters of 4 bytes
on N devices, in S shards with R = N / S replicas. "Layer" and "model" are engine.gather: a pass
gathers one layer of L at a time, forward and backward, or the whole model once. Under autocast the
weights of linear maps travel in bf16.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from metaseq_lm.distributed import placement
from metaseq_lm.distributed.layers import MAX_GATHERED
from metaseq_lm.engine.reduction import ON_THE_WAY
from metaseq_lm.models.transformer.configs import TransformerConfig
from metaseq_lm.models.transformer.encoder import TransformerLM

VOCAB, LENGTH, MASKED = 30522, 128, 20
BACKWARD = 2 / 3  # of the compute time
BILLION: dict[str, Any] = {
    "encoder_layers": 20,
    "encoder_embed_dim": 2048,
    "encoder_ffn_embed_dim": 8192,
    "encoder_attention_heads": 16,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Network:
    """What a model's parameters and one row of 128 tokens take; bytes."""

    parameters: int
    weights: int
    buckets: int  # messages in which the weights travel
    bucket: int  # the largest of them
    layers: int
    layer: int  # one of them, in fp32
    sent: int  # one of them as it is gathered
    casts: int  # of the weights, under autocast
    other_casts: int  # of those outside the layers
    row: int  # what the backward pass needs of a row


def build_network(sizes: dict[str, Any], bf16: bool) -> Network:
    """Build an encoder with a masked-LM head of tensors without memory and count."""
    with FakeTensorMode():
        model = TransformerLM(TransformerConfig(**sizes), VOCAB).train()
        parameters = list(model.parameters())
        size = [p.numel() * p.element_size() for p in parameters]
        buckets = placement.buckets(range(len(parameters)), parameters)
        layers = model.encoder.stack.layers
        layer = sum(p.numel() * p.element_size() for p in layers[0].parameters())
        two, three = (saved_bytes(model, rows, bf16) for rows in (2, 3))
        for module in model.encoder.stack.modules():
            if bf16 and isinstance(module, nn.Linear):
                for name, parameter in list(module.named_parameters()):
                    setattr(module, name, nn.Parameter(parameter.detach().bfloat16()))
        sent = sum(p.numel() * p.element_size() for p in layers[0].parameters())
        two_sent, three_sent = (saved_bytes(model, rows, bf16) for rows in (2, 3))
    return Network(
        parameters=sum(p.numel() for p in parameters),
        weights=sum(size),
        buckets=len(buckets),
        bucket=max(sum(size[i] for i in bucket) for bucket in buckets),
        layers=len(layers),
        layer=layer,
        sent=sent,
        casts=3 * two - 2 * three,
        other_casts=3 * two_sent - 2 * three_sent,
        row=three - two,
    )


def saved_bytes(model: TransformerLM, rows: int, bf16: bool) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, parameters not counted."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    stored: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            stored[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", enabled=bf16):
        tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
        # The graph has to live on, lest storages take each other's places.
        _graph = model(tokens, positions=torch.zeros(rows, MASKED, dtype=torch.long))
    return sum(stored.values())


@dataclass(frozen=True)
class Machine:
    """What a device computes and its links carry; per second."""

    name: str
    flops: float
    latency: float  # seconds that a hop takes
    near: float  # bytes of a device inside its node
    far: float  # bytes of a device to other nodes
    bf16: bool
    node: int = 8
    tree: bool = False  # sums over replicas take log2 hops


def measured(path: Path) -> Machine:
    """Return the machine that measure.py wrote about; its link is taken for both."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    one = next(x for x in lines if x["kind"] == "update" and x["processes"] == 1)
    sums = [x for x in lines if x["kind"] == "link"]  # of two gathers' bytes and hops
    big = max(sums, key=lambda x: x["bytes"])
    count = big["processes"]
    speed = 2 * (count - 1) / count * big["bytes"] / big["seconds"]
    latency = min(x["seconds"] for x in sums) / (2 * (count - 1))
    flops = 6 * one["parameters"] * one["rows"] * LENGTH / one["seconds"]
    return Machine("measured", flops, latency, speed, speed, bf16=False)


# 989 TFLOP/s of dense bf16, half of it reached; NVLink 4; one 400 Gb/s port for each device.
H200 = Machine("h200", 494e12, 10e-6, 450e9, 50e9, bf16=True, tree=True)


@dataclass(frozen=True)
class Plan:
    """A placement of a network on some devices of a machine."""

    network: Network
    machine: Machine
    devices: int
    parallel: str
    rows: int

    @property
    def shards(self) -> int:
        """S."""
        inside = min(self.machine.node, self.devices)
        return {"replicate": 1, "shard": self.devices, "hybrid": inside}[self.parallel]

    @property
    def replicas(self) -> int:
        """R."""
        return self.devices // self.shards

    # ------------------------------------------------------------ memory, bytes per device

    @property
    def held(self) -> float:
        """Parameters, gradients and two moments: 16 P / S."""
        return 4 * self.network.weights / self.shards

    @property
    def activations(self) -> float:
        """What the backward pass needs, for rows computed at once."""
        return self.network.row * self.rows

    @property
    def in_flight(self) -> float:
        """Gradients computed but not summed yet, with their messages: 3 buckets twice."""
        return min(2 * (ON_THE_WAY + 1) * self.network.bucket, 2 * self.network.weights)

    @property
    def _pass(self) -> float:
        return self.activations + self.in_flight

    @property
    def peak_model(self) -> float:
        """16 P / S, 4 P if there are shards; casts to bf16, activations, gradients in flight."""
        weights = self.network.weights if self.shards > 1 else 0
        return self.held + weights + self.network.casts + self._pass

    @property
    def rest(self) -> float:
        """The 4 bytes of what is in no layer: embeddings and head."""
        return self.network.weights - self.network.layers * self.network.layer

    @property
    def peak_layer(self) -> float:
        """16 P / S, the rest, two layers and one's message, instead of the 4 P and casts."""
        if self.shards == 1:
            return self.peak_model
        layers = (MAX_GATHERED + 1) * self.network.sent
        return self.held + self.rest + layers + self.network.other_casts + self._pass

    # ------------------------------------------------------------ bytes that a device sends per
    # update

    @property
    def scattered(self) -> float:
        """4 P (S - 1) / S of gradients."""
        return self.network.weights * (self.shards - 1) / self.shards

    @property
    def layer_gathers(self) -> int:
        """Forward and backward; the backward pass begins with layers that are still there."""
        return 2 * self.network.layers - MAX_GATHERED

    @property
    def gathered(self) -> float:
        """The rest once and the layers twice."""
        whole = self.rest + self.layer_gathers * self.network.sent
        return whole * (self.shards - 1) / self.shards

    @property
    def gathered_at_once(self) -> float:
        """The whole model."""
        whole = self.rest + self.network.layers * self.network.sent
        return whole * (self.shards - 1) / self.shards

    @property
    def summed(self) -> float:
        """2 (R - 1) / R of the 4 P / S that the replicas of a shard sum."""
        return 2 * (self.replicas - 1) / self.replicas * self.network.weights / self.shards

    # ------------------------------------------------------------ seconds per update

    @property
    def compute(self) -> float:
        """6 P FLOPs a token."""
        return 6 * self.network.parameters * self.rows * LENGTH / self.machine.flops

    def _ring(self, size: float, messages: int) -> float:
        """A gather or a scattered sum: S - 1 hops for each message, over the slowest link."""
        machine = self.machine
        # A ring crosses to the next node once, over the ports of all the node's devices together.
        between = min(machine.near, machine.far * machine.node)
        link = machine.near if self.shards <= machine.node else between
        return size / link + messages * (self.shards - 1) * machine.latency

    @property
    def gradient_seconds(self) -> float:
        """The scattered sum, and the sum over the replicas of a shard."""
        if self.replicas == 1:
            return self._ring(self.scattered, self.network.buckets)
        machine, count = self.machine, self.replicas
        hops = 2 * math.log2(count) if machine.tree else 2 * (count - 1)
        far = machine.far if self.shards > 1 else min(machine.near, machine.far * machine.node)
        link = machine.near if self.devices <= machine.node else far
        wide = self.summed / link + self.network.buckets * hops * machine.latency
        return self._ring(self.scattered, self.network.buckets) + wide

    def seconds(self, gather: str = "layer", ahead: bool = True, overlap: bool = True) -> float:
        """What waits, and the longer of computing and what is sent meanwhile, forward and backward.

        Of the gathers the rest and the first layer wait, or all if there are none `ahead` of their
        turn or the model is gathered at once; of the gradients the last bucket, or all without
        `overlap`.
        """
        network = self.network
        if gather == "layer":
            gathers = self._ring(self.gathered, self.layer_gathers + 1)
            begin = (self.rest + network.sent) * (self.shards - 1) / self.shards
            waits = self._ring(begin, 2) if ahead else gathers
        else:
            waits = gathers = self._ring(self.gathered_at_once, network.buckets)
        last = self.gradient_seconds * (network.bucket / network.weights if overlap else 1)
        behind = (gathers - waits) / 2  # forward; as many backward
        forward = max((1 - BACKWARD) * self.compute, behind)
        backward = max(BACKWARD * self.compute, behind + self.gradient_seconds - last)
        return waits + forward + backward + last


def table(network: Network, machine: Machine, devices: list[int], rows: int) -> Iterator[str]:
    """Yield the lines of the table of placements."""
    titles = ["devices", "placement", "held", "peak L", "peak M", "gather", "scatter", "sum"]
    titles += ["tokens/s", "L", "M", "L in turn", "at end"]
    yield "  ".join(f"{title:>9}" for title in titles)
    for count in devices:
        for parallel in ("replicate", "shard", "hybrid"):
            plan = Plan(network, machine, count, parallel, rows)
            sizes = [plan.held, plan.peak_layer, plan.peak_model]
            sizes += [plan.gathered, plan.scattered, plan.summed]
            times = [plan.seconds(), plan.seconds("model"), plan.seconds(ahead=False)]
            times += [plan.seconds(overlap=False)]
            cells = [str(count), parallel, *(f"{size / 1e9:.2f}" for size in sizes)]
            cells += [f"{rows * count * LENGTH / times[0]:.4g}"]
            cells += [f"{plan.compute / time:.1%}" for time in times]
            yield "  ".join(f"{cell:>9}" for cell in cells)


def check(path: Path) -> Iterator[str]:
    """Yield what processes of measure.py held, and their peak increase, beside the formulas."""
    yield "processes  placement  gather  held MB  formula  ratio  peak MB  formula  ratio"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    networks: dict[str, Network] = {}
    for line in [x for x in lines if x["kind"] == "update" and x["overlap"]]:
        key = json.dumps(line["model"])
        if key not in networks:
            sizes = line["model"] | {"init": "xavier_attention"}  # the other reads numbers
            networks[key] = build_network(sizes, bf16=False)
        cpu = Machine("", 1, 0, 1, 1, bf16=False)
        plan = Plan(networks[key], cpu, line["processes"], line["parallel"], line["rows"])
        peak = plan.peak_layer if line["gather"] == "layer" else plan.peak_model
        cells = [f"{line['processes']:>9}  {line['parallel']:>9}  {line['gather']:>6}"]
        for value, formula, width in [
            (sum(line["held"].values()), plan.held, 7),
            (line["peak"] - line["base"], peak, 7),
        ]:
            cells.append(
                f"{value / 1e6:>{width}.1f}  {formula / 1e6:>7.1f}  {value / formula:>5.2f}"
            )
        yield "  ".join(cells)


def main() -> None:
    """Print the table of a machine, or the check of the formulas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path, nargs="?", help="lines of measure.py")
    parser.add_argument("--assume", choices=["h200"], help="constants of a data sheet instead")
    parser.add_argument(
        "--check", type=Path, help="lines of measure.py, compared with the formulas"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--rows", type=int, default=32, help="of 128 tokens, on each device")
    options = parser.parse_args()
    if options.check:
        print("\n".join(check(options.check)))
        return
    if options.measured is None and options.assume is None:
        parser.error("give the lines of measure.py, or --assume h200")
    machine = measured(options.measured) if options.measured else H200
    network = build_network(BILLION, machine.bf16)
    print(
        f"{machine.name}: {machine.flops / 1e9:,.0f} GFLOP/s, {machine.latency * 1e6:.0f} us a "
        f"hop, links of {machine.near / 1e9:.2f} and {machine.far / 1e9:.2f} GB/s; "
        f"{network.parameters:,} parameters in {network.buckets} buckets, {network.row / 1e6:.0f} "
        f"MB a row, {network.casts / 1e9:.2f} GB of casts"
    )
    print("\n".join(table(network, machine, options.devices, options.rows)))


if __name__ == "__main__":
    main()
