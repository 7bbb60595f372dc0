"""What a simulation rests on, in words, to be shown beside its figures."""

from __future__ import annotations

from dmuon.simulator.step import Scenario
from dmuon.simulator.workload import EXPERTS_PER_TOKEN


def assumptions(scenario: Scenario) -> tuple[str, ...]:
    """Everything that ``scenario``'s figures take for granted, one sentence or two each."""
    machine, network = scenario.network.cluster.machine, scenario.network
    itemsize = network.itemsize
    return (
        "All figures are simulated; nothing ran.",
        f"Devices and links: {machine.name}. Ranks are alike, and nobody else uses the network.",
        f"Forward and backward run at {machine.training:.0%} of the peak in {scenario.compute}, on "
        f"{scenario.tokens:,} tokens for each rank; a backward takes two forwards.",
        "Each element of a weight is one multiply-add for each token, in every part of a model alike (vision, text, "
        f"actions); of a stack of experts at most {EXPERTS_PER_TOKEN} are used. Attention's scores, recomputation, "
        "accumulation, clipping, data loading and the host are not counted.",
        f"An owner's Newton–Schulz: {scenario.costs.source}. Other Muons': operations at {machine.products:.0%} of the "
        "peak, or bytes.",
        f"Other work of an optimizer reads and writes fp32 once, at {machine.memory_rate / 1e9:,.0f} GB/s.",
        f"A collective takes {machine.call * 1e6:g} µs and a hop for each step around its ring, "
        f"{machine.inside.hop * 1e6:g} µs in a node and {machine.across.hop * 1e6:g} µs between nodes; its bytes go at "
        f"{machine.inside.rate / 1e9:g} GB/s in a node and {machine.across.rate / 1e9:g} GB/s for each rank between "
        "nodes.",
        "Collectives on the same links run one after the other. "
        + (
            "They do not slow down computation beside them."
            if machine.overlaps
            else "Computation waits while they run."
        ),
        f"Weights travel in {itemsize} bytes an element. FSDP sums gradients in fp32. Owned gradients travel in "
        f"{itemsize} bytes by all-to-all or in fp32 as partial sums, whichever is quicker.",
        "Sharding: "
        + ("inside nodes, replicated across them (hybrid)" if network.hybrid else "over all ranks")
        + (
            "; weights are freed after the forward, all but the last block's (ZeRO-3)."
            if scenario.zero3
            else "; weights are kept until the backward (ZeRO-2)."
        ),
        "Weights of one block are fetched while the block before runs. Owners publish a block's as soon as all of it "
        "has moved.",
        "Gathered Muon: standard Newton–Schulz with whole products on every rank, matrix after matrix, nothing beside "
        "it. Muon by all-to-all: standard Newton–Schulz with half products, in rounds of one matrix for each shard, "
        "padded where there are fewer, as microsoft/dion has it; rounds overlap.",
        "Memory: weights, gradients and state in fp32, two blocks in passing, no activations.",
    )
