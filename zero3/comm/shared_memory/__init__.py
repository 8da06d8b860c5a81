"""Transfers between processes of one host, through memory that all of them see. For CPU ranks; a GPU's ranks never come here.

Why: on CPUs the processor that computes also moves the bytes. gloo moves them through sockets: two copies, packets, system
calls, and a thread on each side that takes time from the computation. Through shared memory it is two copies and nothing
else. It makes tests and development with several processes on one machine quick, and training on CPUs too.

When: gloo's transfers of chunks and gradients (`comm/gloo.py`), between ranks whose processes share a host and a network,
can open each other's files through `/proc`, and run Linux on x86-64. The ranks find out together at their first transfer
(`neighbours.meet`). What is not near goes through the group's sockets, and so do NCCL's transfers, broadcasts, exchanges
of a few bytes, and all that torch itself does (DDP's reductions, say).

How to switch it off: `ZERO3_HOST_MEMORY=0` in the environment of every rank, before the first transfer. Results are the same bits.

`neighbours.py` finds the processes, `host_memory.py` moves the tensors. Nothing outside `comm/` knows of either, but for
`comm/factory.give_memory_back`, which frees what transfers took.
"""
