"""The machines of the race: `zero3.Cluster`s, and what is known of them."""

from __future__ import annotations

from dataclasses import replace

from zero3.planning.cluster import PRODUCT, Cluster, cluster_of

GBIT = 1e9 / 8
GIB = 2**30
LINKS = (400, 200, 100)  # Gbit/s a GPU, between nodes

# By data sheet, of which as much is reached as `zero3.plan` assumes.
H100 = replace(cluster_of("h100", 400 * GBIT), reached=PRODUCT)
# That of the published figures: "96GB HBM2e with 2.4 TB/sec peak memory bandwidth", "the default 500W power limit".
H100_500W = cluster_of("h100-500w", 400 * GBIT)

# Of the share of its data sheet's FLOP/s that this GPU reaches, the one number that is fitted: on the cells of `validate.FITTED`, which no
# judgement uses. Its publishers say that its peak is below the data sheet's (power is limited to 500 W), and do not know what it is.
REACHED = H100_500W.reached

MACHINES: dict[str, Cluster] = {"H100 of 500 W": H100_500W, "H100 by data sheet": H100}


# GiB that torch sees: as the publishers of the figures tell it, and as NVIDIA's tools tell it of a GPU of 80 GB (81559 MiB).
CAPACITY = {"H100 of 500 W": 95.0396, "H100 by data sheet": 81559 / 1024}


def with_link(machine: Cluster, gigabits: float) -> Cluster:
    """`gigabits`: a second, of one GPU between nodes."""
    return replace(machine, link=gigabits * GBIT)
