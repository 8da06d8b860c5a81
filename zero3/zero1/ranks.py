"""The ranks that share a ZeroRedundancyOptimizer: what they compare, and what one of them tells the
others.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import agree, agreeing
from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..comm.factory import WrongMesh, any_device_of, communicator_for
from ..comm.plain_values import decode_scalar, encode_scalar
from .division import Spread, flat, is_gapless
from .groups import as_values

__all__: list[str] = []

_ACTIVE, _JOINED, _FAILED = range(3)
_BITS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
_SAMPLE = 2**16  # of a larger tensor every second element is looked at, or every third, ...


class Listing:
    """What this rank's parameters hold, one after another: sums of the bits of values, and of those
    of gradients, since the values of biases may be alike. So ranks find out that they have listed
    the same parameters in different orders, which names and shapes may not show.
    """

    def __init__(self, spreads: Sequence[Spread], device: torch.device) -> None:
        self._names = [spread.name for spread in spreads]
        parameters = [spread.parameter for spread in spreads]
        tensors = [*parameters, *(parameter.grad for parameter in parameters)]
        sums = [_sum_of_bits(tensor).to(device) for tensor in tensors]
        self._form = f"<{len(sums)}q"
        self.sums = struct.pack(self._form, *torch.stack(sums).tolist())

    def check(self, told: Mapping[int, bytes]) -> None:
        """Ranks may hold other values, which updates make alike. It is a mistake if they hold the
        same ones at other parameters.

        Args:
            told: Rank -> its sums.

        Raises:
            ValueError: A rank has another order than the first one.
        """
        count = len(self._names)
        for what, held in (("values", slice(count)), ("gradient", slice(count, None))):
            sums = {rank: struct.unpack(self._form, each)[held] for rank, each in told.items()}
            least, first = next(iter(sums.items()))
            for rank, theirs in sums.items():
                if theirs != first and sorted(theirs) == sorted(first):
                    place = next(place for place in range(count) if theirs[place] != first[place])
                    raise ValueError(
                        f"rank {rank}: {self._names[place]} has the {what} that "
                        f"{self._names[first.index(theirs[place])]} has on rank {least}. Give all "
                        "ranks the same parameters in the same order"
                    )


def _sum_of_bits(tensor: Tensor | None) -> Tensor:
    """Is the same wherever the bits are."""
    if tensor is None or tensor.layout != torch.strided or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    tensor = tensor.detach()
    elements = flat(tensor) if is_gapless(tensor) else tensor.reshape(-1)
    elements = elements[:: -(-len(elements) // _SAMPLE)]
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    return elements.view(_BITS[elements.element_size()]).sum()


class Ranks:
    """One communicator for each device (`on`). Small things are exchanged on the first one."""

    def __init__(self, on: dict[torch.device, Communicator]) -> None:
        self.on = on
        self.device, self.communicator = next(iter(on.items()))
        self.index, self.count = self.communicator.rank, self.communicator.world_size

    @classmethod
    def of(
        cls, process_group: Any, devices: Iterable[torch.device]
    ) -> tuple[Ranks, Exception | None]:
        """Returns the ranks of a group, and the mistake in `process_group`, if any.

        After a mistake they are the default group's. The other ranks most likely use it, and wait
        there.
        """
        devices = list(dict.fromkeys(devices)) or [any_device_of(process_group)]
        try:
            found = {device: communicator_for(process_group, device) for device in devices}
            if any(each.shards < each.world_size for each in found.values()):
                raise TypeError(
                    "process_group is a mesh of two dimensions, expected a process group or a "
                    "mesh of one: there are no replicas here"
                )
            return cls(found), None
        except (TypeError, WrongMesh) as mistake:
            return cls({device: communicator_for(None, device) for device in devices}), mistake

    def naming(self, doing: str, what: str, caller: str = "") -> NamingFailures:
        """Context whose errors tell the rank and the purpose of a transfer that fails inside."""
        return NamingFailures(self.communicator, doing, Subject(what), caller)

    @contextmanager
    def agreeing(self, caller: str = "ZeroRedundancyOptimizer") -> Iterator[list[str]]:
        """`agreeing` of these ranks, about the parameters of the optimizer."""
        what = "the parameters of ZeroRedundancyOptimizer"
        with agreeing(self, what, caller) as lines, as_values():
            yield lines

    def roll_call(
        self,
        lines: list[str],
        *,
        joined: bool,
        error: Exception | None = None,
        listing: Listing | None = None,
    ) -> int | None:
        """Returns the first rank with data, if another one has joined (has no data any more). It
        tells the others what to do.

        Ranks with data compare `lines`, and the `listing` of parameters in a first step. Each rank
        sends 16 bytes; texts follow only if these differ.

        Raises:
            ValueError, TypeError, RuntimeError: The `error` of a rank, or the first line that
                differs. Every rank raises it.
        """
        state = _JOINED if joined else _ACTIVE if error is None else _FAILED
        sums = b"" if listing is None else listing.sums
        digest = hashlib.sha256("\n".join(lines).encode() + sums).digest()[:15]
        subject = "what a step of ZeroRedundancyOptimizer updates"
        with self.naming("comparing with the other ranks", subject, "ZeroRedundancyOptimizer.step"):
            said = self.communicator.exchange(digest + bytes([state]), self.device)
        active = [rank for rank, each in enumerate(said) if each[-1] != _JOINED]
        heard = {said[rank] for rank in active}
        if len(heard) > 1 or any(each[-1] == _FAILED for each in heard):
            told = None if joined else lines
            agree(self, "what a step updates", told, error)
            if listing is not None:  # lines are alike, but not what parameters hold
                with self.naming("comparing with the other ranks", subject):
                    held = self.communicator.exchange(sums, self.device)
                listing.check({rank: held[rank] for rank in active})
        return active[0] if 0 < len(active) < self.count else None

    def tell(self, values: dict[str, Any], source: int, what: str) -> dict[str, Any]:
        """Returns the small values of rank `source`; those of the other ranks do not matter.

        JSON is sent, so no rank can make another rank run code.

        Raises:
            TypeError: JSON can't hold a value. Every rank raises it.
        """
        own = self.index == source
        with agreeing(self, what):
            payload = bytearray(json.dumps(encode_scalar(values, what)) if own else "", "utf-8")
        size = torch.tensor([len(payload)], device=self.device)
        with self.naming("broadcasting", f"what rank {source} has to tell of {what}"):
            self.communicator.broadcast(size, source)
            content = torch.empty(int(size), dtype=torch.uint8, device=self.device)
            if own:
                content.copy_(torch.frombuffer(payload, dtype=torch.uint8))
            self.communicator.broadcast(content, source)
        return (
            values if own else dict(decode_scalar(json.loads(bytes(content.tolist())), self.device))
        )

    def broadcast(self, tensor: Tensor, source: int, doing: str, what: str) -> None:
        """Copies rank `source`'s values to every rank, however they lie in memory. `doing` and
        `what`: for the error.
        """
        gapless = is_gapless(tensor)
        values = flat(tensor) if gapless else tensor.contiguous()
        with self.naming(doing, what):
            self.on[values.device].broadcast(values, source)
        if not gapless and self.index != source:
            tensor.copy_(values)
