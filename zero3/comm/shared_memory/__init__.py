"""Transfers between processes on one host, through shared memory. CPU ranks alone use it. Sockets
would take several times as long, and processors from the computation: see docs/design.md, "On one
host, without a GPU".

It serves gloo's transfers of chunks and gradients (`comm/gloo.py`). All others use the group's
sockets or NCCL: those between hosts, broadcasts, and torch's own collectives (DDP's reductions, for
example). `ZERO3_HOST_MEMORY=0` in the environment of every rank, before the first transfer,
switches it off. The results are the same bits.

`neighbours.py` finds the processes, and `host_memory.py` moves the tensors.
"""
