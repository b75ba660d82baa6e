"""Memory, bytes and time of an update of a large model on 8, 64 and 1024 devices, by placement.

    python examples/scaling/model.py examples/scaling/measured.jsonl
    python examples/scaling/model.py --check examples/scaling/memory.jsonl

The model is built of tensors without memory. `Plan` has all the formulas: P parameters of 4 bytes
on N devices, in S shards with R = N / S replicas, of L layers and of what is in no layer. Devices
and their links are those of a data sheet; what the hosts take is read from lines of measure.py.
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
from measure import LENGTH, VOCAB, Launches
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.distributed import shards
from metaseq_lm.distributed.process_group import axes_through
from metaseq_lm.models.transformer.encoder import TransformerLM

MASKED = 20
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
    embedding: int  # the largest of them
    buckets: int  # messages in which their gradients travel if each process has them whole
    bucket: int  # the largest of these
    layers: int
    layer: int  # one of them
    casts: int  # of the weights, under autocast
    row: int  # what the backward pass needs of a row
    launches: tuple[int, int]  # operations of a forward and of a backward pass

    @property
    def rest(self) -> int:
        """What is in no layer: embeddings and head."""
        return self.weights - self.layers * self.layer


def build_network(sizes: dict[str, Any], bf16: bool) -> Network:
    """Build an encoder with a masked-LM head of tensors without memory and count."""
    with FakeTensorMode():
        model = TransformerLM(TransformerConfig(**sizes), VOCAB).train()
        parameters = list(model.parameters())
        size = [p.numel() * p.element_size() for p in parameters]
        buckets = shards.group_into_buckets(range(len(parameters)), parameters)
        layers = model.encoder.stack.layers
        two, three = (saved_bytes(model, rows, bf16) for rows in (2, 3))
        return Network(
            parameters=sum(p.numel() for p in parameters),
            weights=sum(size),
            embedding=max(size),
            buckets=len(buckets),
            bucket=max(sum(size[i] for i in bucket) for bucket in buckets),
            layers=len(layers),
            layer=sum(p.numel() * p.element_size() for p in layers[0].parameters()),
            casts=3 * two - 2 * three,
            row=three - two,
            launches=launches_of(model, bf16),
        )


def logits(model: nn.Module, rows: int) -> torch.Tensor:
    """Return the logits of rows of tokens, at some positions of each."""
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    result: torch.Tensor = model(tokens, positions=torch.zeros(rows, MASKED, dtype=torch.long))
    return result


def saved_bytes(model: nn.Module, rows: int, bf16: bool) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, parameters not counted."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    stored: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            stored[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", enabled=bf16):
        # The graph has to live on, lest storages take each other's places.
        _graph = logits(model, rows)
    return sum(stored.values())


def launches_of(model: nn.Module, bf16: bool) -> tuple[int, int]:
    """Return how many operations a forward and a backward pass have."""
    with Launches() as launches:
        with torch.autocast("cpu", enabled=bf16):
            loss = logits(model, 2).float().logsumexp(-1).sum()
        forward = launches.count
        loss.backward()
    return forward, launches.count - forward


@dataclass(frozen=True)
class Machine:
    """What a device computes, and its links and its host carry; bytes per second, seconds.

    A device is an H200 of the data sheet: 989 TFLOP/s of dense bf16, half of it reached; NVLink 4;
    one 400 Gb/s port for each device.
    """

    launch: float  # that the host takes for an operation
    collective: float  # for a collective of fully_shard
    # Between two hosts by gloo, whose sum over N processes makes 2 (N - 1) hops: on an idle machine
    # three sums of 16 processes took 3.68 ms, of 2 processes 0.27 ms (commit 91daf6d).
    host_hop: float = 3.68e-3 / 90
    flops: float = 494e12
    memory: float = 4.8e12
    hop: float = 10e-6  # between two devices
    near: float = 450e9  # inside a node
    far: float = 50e9  # to other nodes
    node: int = 8


def machine_of(path: Path) -> Machine:
    """Return the machine with the host that measure.py wrote about."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    host = next(line for line in lines if line["kind"] == "host")
    return Machine(host["launch"], host["collective"])


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
        """What the backward pass needs, for rows computed at once, and casts of all weights."""
        return self.network.row * self.rows + self.network.casts

    @property
    def peak(self) -> float:
        """The larger of what the beginning and the end of the backward pass take.

        At the beginning there are no gradients yet but that of the tied embedding's output, and all
        activations; at the end all gradients, no activations, and a second gradient of the
        embedding, or of shards the message of what is in no layer, twice with gloo.
        """
        network = self.network
        begin = 0.75 * self.held + self.activations + network.embedding
        if self.shards > 1:  # a layer, the next one, and the message in which it comes
            begin += network.rest + 3 * network.layer
        return max(begin, self._end)

    @property
    def _end(self) -> float:
        network = self.network
        if self.shards > 1:
            return self.held + 3 * network.rest
        return self.held + network.embedding + (network.bucket if self.devices > 1 else 0)

    @property
    def resident(self) -> float:
        """The end of the backward pass where freed activations stay with the process.

        Those of less than 1 MB do in shards, all with engine.retain_heap.
        """
        return max(self.peak, self._end + self.activations)

    # ------------------------------------------------------------ bytes that a device sends per
    # update

    @property
    def part(self) -> float:
        """(S - 1) / S: what a device has not got of what is gathered or scattered."""
        return (self.shards - 1) / self.shards

    @property
    def gathered(self) -> float:
        """What is in no layer once and the layers twice."""
        return (self.network.rest + 2 * self.network.layers * self.network.layer) * self.part

    @property
    def scattered(self) -> float:
        """4 P (S - 1) / S of gradients."""
        return self.network.weights * self.part

    @property
    def summed(self) -> float:
        """2 (R - 1) / R of the 4 P / S that the replicas of a shard sum."""
        return 2 * (self.replicas - 1) / self.replicas * self.network.weights / self.shards

    # ------------------------------------------------------------ seconds per update

    @property
    def compute(self) -> float:
        """6 P FLOPs a token."""
        return 6 * self.network.parameters * self.rows * LENGTH / self.machine.flops

    def _ring(self, size: float, messages: int = 1) -> float:
        """A gather or a scattered sum: S - 1 hops for each message, over the slowest link."""
        machine = self.machine
        # A ring crosses to the next node once, over the ports of all the node's devices together.
        between = min(machine.near, machine.far * machine.node)
        link = machine.near if self.shards <= machine.node else between
        return size * self.part / link + messages * (self.shards - 1) * machine.hop

    def _sum(self, size: float, messages: int = 1) -> float:
        """Gradients of so many bytes: the scattered sum, and that over the replicas of a shard."""
        seconds = self._ring(size, messages) if self.shards > 1 else 0.0
        if self.replicas == 1:
            return seconds
        machine = self.machine
        far = machine.far if self.shards > 1 else min(machine.near, machine.far * machine.node)
        link = machine.near if self.devices <= machine.node else far
        sent = 2 * (self.replicas - 1) / self.replicas * size / self.shards
        return seconds + sent / link + messages * 2 * math.log2(self.replicas) * machine.hop

    @property
    def waits(self) -> dict[str, float]:
        """What a device waits for while it does not compute.

        The gathers of the first layer and of what is in no layer come before all, the sum of the
        last message after all; the others meanwhile, as long as they do not take longer than
        computing. The step reads weights, gradients and moments and writes all but the gradients.
        """
        network, machine = self.network, self.machine
        waits = {"step": 7 * network.weights / self.shards / machine.memory}
        if self.shards == 1:
            last, behind, messages = network.bucket, 0.0, network.buckets - 1
        else:
            waits["first gathers"] = self._ring(network.rest + network.layer, 2)
            others = network.layers - 1
            gathers = self._ring(others * network.layer, others)
            waits["gathers"] = max(0.0, gathers - (1 - BACKWARD) * self.compute)
            last, messages = network.rest, network.layers
            behind = self._ring(network.layers * network.layer, network.layers)
        sums = self._sum(network.weights - last, messages) if self.devices > 1 else 0.0
        waits["sums"] = max(0.0, behind + sums - BACKWARD * self.compute)
        waits["last sum"] = self._sum(last) if self.devices > 1 else 0.0
        # The norm, and of shards the logs.
        messages = 0 if self.shards == 1 else 2
        waits["small sums"] = messages * 2 * math.log2(self.devices) * machine.hop
        return waits

    @property
    def host(self) -> dict[str, float]:
        """What the host takes meanwhile: operations, collectives, and the sum over hosts.

        Of shards the sum, of sizes and of what the limits depend on, comes before the pass;
        otherwise while the forward pass is launched.
        """
        network, machine = self.network, self.machine
        forward, backward = (n * machine.launch for n in network.launches)
        hops = sum(2 * (len(axis) - 1) for axis in axes_through(0, self.devices))
        numbers = hops * machine.host_hop
        if self.shards == 1:
            messages = network.buckets if self.devices > 1 else 0
            numbers = max(0.0, numbers - forward)
        else:
            messages = 3 * network.layers + 2
        launches = forward + backward + messages * machine.collective
        return {"launches": launches, "hosts' sum": numbers}

    @property
    def seconds(self) -> float:
        """The longer of what the device and what the host takes."""
        return max(self.compute + sum(self.waits.values()), sum(self.host.values()))

    @property
    def limit(self) -> str:
        """The largest term beside computing."""
        is_device = self.compute + sum(self.waits.values()) >= sum(self.host.values())
        terms = self.waits if is_device else self.host
        return max(terms, key=terms.__getitem__)


def memory_table(network: Network, machine: Machine, devices: list[int]) -> Iterator[str]:
    """Yield the lines of the table of memory and bytes."""
    titles = ["devices", "placement", "held", "peak", "gather", "scatter", "sum"]
    yield "  ".join(f"{title:>9}" for title in titles)
    for plan in plans(network, machine, devices, 32):
        sizes = [plan.held, plan.peak, plan.gathered, plan.scattered, plan.summed]
        cells = [str(plan.devices), plan.parallel, *(f"{size / 1e9:.2f}" for size in sizes)]
        yield "  ".join(f"{cell:>9}" for cell in cells)


def time_table(network: Network, machine: Machine, devices: list[int], rows: int) -> Iterator[str]:
    """Yield the lines of the table of times, in milliseconds."""
    titles = ["devices", "placement", "compute", "waits", "launches", "hosts' sum"]
    titles += ["efficiency", "of devices", "limit"]
    yield "  ".join(f"{title:>11}" for title in titles)
    for plan in plans(network, machine, devices, rows):
        times = [plan.compute, sum(plan.waits.values()), *plan.host.values()]
        cells = [str(plan.devices), plan.parallel, *(f"{1e3 * time:.1f}" for time in times)]
        cells += [f"{plan.compute / time:.1%}" for time in (plan.seconds, sum(times[:2]))]
        cells += [plan.limit]
        yield "  ".join(f"{cell:>11}" for cell in cells)


def plans(network: Network, machine: Machine, devices: list[int], rows: int) -> Iterator[Plan]:
    """Yield the plans of a table."""
    for count in devices:
        for parallel in ("replicate", "shard", "hybrid"):
            yield Plan(network, machine, count, parallel, rows)


def check(path: Path) -> Iterator[str]:
    """Yield what processes of measure.py held, and their peak increase, beside the formulas."""
    yield "processes    placement  held MB  formula  ratio  peak MB  formula  ratio"
    networks: dict[str, Network] = {}
    machine = Machine(0.0, 0.0)
    for line in map(json.loads, path.read_text().splitlines()):
        if line.get("parallel") not in ("replicate", "shard", "hybrid"):
            continue
        key = json.dumps(line["model"])
        if key not in networks:
            sizes = line["model"] | {"init": "xavier_attention"}  # the other reads numbers
            networks[key] = build_network(sizes, bf16=False)
        plan = Plan(networks[key], machine, line["processes"], line["parallel"], line["rows"])
        cells = [f"{line['processes']:>9}  {line['parallel']:>11}"]
        for value, formula in ((line["held"], plan.held), (line["peak"], plan.resident)):
            cells.append(f"{value / 1e6:>7.1f}  {formula / 1e6:>7.1f}  {value / formula:>5.2f}")
        yield "  ".join(cells)


def main() -> None:
    """Print the tables of a machine, or the check of the formulas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path, nargs="?", help="lines of measure.py")
    parser.add_argument(
        "--check", type=Path, help="lines of measure.py, compared with the formulas"
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128], help="on each device")
    options = parser.parse_args()
    if options.check:
        print("\n".join(check(options.check)))
        return
    if options.measured is None:
        parser.error("give the lines of measure.py")
    machine = machine_of(options.measured)
    network = build_network(BILLION, bf16=True)
    forward, backward = network.launches
    print(
        f"{network.parameters:,} parameters, {network.row / 1e6:.0f} MB a row, "
        f"{network.casts / 1e9:.2f} GB of casts, {network.rest / 1e6:.0f} MB in no layer\n"
        f"{forward + backward:,} operations of {machine.launch * 1e6:.1f} us, collectives of "
        f"{machine.collective * 1e6:.0f} us, {machine.host_hop * 1e6:.0f} us a hop of hosts"
    )
    print("\nGB, with 4,096 tokens on each device")
    print("\n".join(memory_table(network, machine, options.devices)))
    for rows in options.rows:
        print(f"\nms, with {rows * LENGTH:,} tokens on each device")
        print("\n".join(time_table(network, machine, options.devices, rows)))


if __name__ == "__main__":
    main()
