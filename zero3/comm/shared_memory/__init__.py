"""Transfers between processes on one host, through shared memory. Only CPU ranks use it.

Why: on CPUs the processor that computes also moves the bytes. gloo moves them through sockets,
which takes two copies, packets, system calls, and a thread on each side that slows the computation
down. Shared memory takes two copies and nothing else. So tests, development with several processes
on one machine, and training on CPUs are faster.

When: for gloo's transfers of chunks and gradients (`comm/gloo.py`), between ranks on Linux on
x86-64 whose processes share a host and a network, and can open each other's files through `/proc`.
The ranks find this out at their first transfer (`neighbours.meet`). All other transfers use the
group's sockets or NCCL: those between hosts, broadcasts, exchanges of a few bytes, and torch's own
collectives (DDP's reductions, for example).

How to switch it off: set `ZERO3_HOST_MEMORY=0` in the environment of every rank, before the first
transfer. The results are the same bits.

`neighbours.py` finds the processes, and `host_memory.py` moves the tensors. Outside `comm/`, only
the callers of `comm/factory.give_memory_back`, which frees the memory of transfers, know about
either.
"""
