"""From measured constants to tokens per second at 1 ... 1024 devices, and where that breaks.

    python examples/scaling/model.py measured.json            # this machine's constants
    python examples/scaling/model.py --assume h200            # a data sheet's constants

An update takes  compute + small messages + the part of the gradients' time that is not hidden
behind the last backward pass. Gradients cross the slowest link 2 (N - 1) / N times. A message costs
2 (N - 1) latencies on gloo's ring, 2 log2 N on NCCL's trees.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

BUCKET_BYTES = 25 << 20
SMALL_MESSAGES = 2  # of an update: the sizes of the batch, and what all agree to stop for
BACKWARD = 2 / 3  # of the compute time


@dataclass
class Machine:
    """What one device computes and what a link carries; seconds and bytes per second."""

    name: str
    compute: float  # seconds of an update of `rows` rows on one device
    rows: int
    parameters: int
    latency: float
    near: float  # link inside a node, bytes per second
    far: float  # link between nodes, per device
    node: int = 8
    tree: bool = False

    def hops(self, devices: int) -> float:
        """Return the latencies that a message to all and back costs."""
        return 2 * math.log2(devices) if self.tree else 2 * (devices - 1)


def measured(path: Path) -> Machine:
    """Return the machine that measure.py wrote about; all its processes are one node."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    one = next(x for x in lines if x["kind"] == "update" and x["processes"] == 1)
    links = [x for x in lines if x["kind"] == "link"]
    big = max(links, key=lambda x: x["bytes"])
    small = min((x for x in links if x["bytes"] <= 1 << 16), key=lambda x: x["seconds"])
    count = big["processes"]
    speed = 2 * (count - 1) / count * big["bytes"] / big["seconds"]
    latency = small["seconds"] / (2 * (count - 1))
    rows, parameters = one["rows"], one["parameters"]
    return Machine("measured", one["seconds"], rows, parameters, latency, speed, speed, 1 << 20)


def assumed(parameters: int, rows: int) -> Machine:
    """Return H200s at half of their dense bf16 rate, NVLink 4 and one 400 Gb/s port for each.

    Data-sheet numbers, not measured: 989 TFLOP/s, 450 GB/s one way, 50 GB/s.
    """
    flops = 6 * parameters * rows * 128
    return Machine("h200", flops / 494e12, rows, parameters, 10e-6, 450e9, 50e9, tree=True)


def seconds(machine: Machine, devices: int, overlap: bool = True, zero: bool = False) -> float:
    """Return the time of an update on so many devices, the same rows on each."""
    if devices == 1:
        return machine.compute
    link = machine.near if devices <= machine.node else machine.far
    size = 4 * machine.parameters
    messages = max(1, -(-size // BUCKET_BYTES))
    small = machine.hops(devices) * machine.latency
    gradients = 2 * (devices - 1) / devices * size / link + messages * small
    # The last bucket is sent when the backward pass is over; the others travel beside it.
    hidden = 0.0
    if overlap and messages > 1:
        hidden = min(gradients * (messages - 1) / messages, BACKWARD * machine.compute)
    total = machine.compute + gradients - hidden + SMALL_MESSAGES * small
    if zero:  # every owner sends its share of the parameters to all, one owner after the other
        total += size / link + devices * small / 2
    return total


def table(machine: Machine) -> str:
    """Return tokens per second and efficiency for every count of devices."""
    head = f"{'devices':>7}  {'rows':>7}  {'update s':>9}  {'tokens/s':>10}  {'efficiency':>10}"
    lines = [head + f"  {'no overlap':>10}  {'ZeRO-1':>7}"]
    for power in range(11):
        n = 2**power
        one = machine.compute
        whole, plain, zero = (
            seconds(machine, n),
            seconds(machine, n, overlap=False),
            seconds(machine, n, zero=True),
        )
        rate = machine.rows * n * 128 / whole
        lines.append(
            f"{n:>7}  {machine.rows * n:>7}  {whole:>9.4g}  {rate:>10.4g}  {one / whole:>10.1%}"
            f"  {one / plain:>10.1%}  {one / zero:>7.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table of a machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measured", type=Path, nargs="?", help="lines of measure.py")
    parser.add_argument("--assume", choices=["h200"], help="constants of a data sheet instead")
    parser.add_argument("--parameters", type=int, default=110_000_000, help="with --assume")
    parser.add_argument(
        "--rows", type=int, default=256, help="of 128 tokens per device, with --assume"
    )
    options = parser.parse_args()
    if options.measured is None and options.assume is None:
        parser.error("give the lines of measure.py, or --assume h200")
    machine = (
        measured(options.measured)
        if options.measured
        else assumed(options.parameters, options.rows)
    )
    print(
        f"{machine.name}: {machine.parameters:,} parameters, {4 * machine.parameters / 1e6:.0f} MB of "
        f"gradients, {machine.rows} rows per device, {machine.compute:.3g} s alone, latency "
        f"{machine.latency * 1e6:.0f} us, link {machine.near / 1e9:.2f} and {machine.far / 1e9:.2f} GB/s"
    )
    print(table(machine))


if __name__ == "__main__":
    main()
