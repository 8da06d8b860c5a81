"""What comes and goes during a step in turns, and threads that see to it, so that computing need
not wait for a disk.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from ..scratch.mapped_files import MappedFiles
from ..stores.files import Files

__all__: list[str] = []

_BEING_WRITTEN = 2  # visits at any time; so what has changed and is not on the disk yet is bounded


class Visit(NamedTuple):
    """What a turn works on, of what lies in files."""

    layer: str  # for errors
    place: Files
    values: list[Tensor]
    gradients: list[Tensor]
    files: MappedFiles
    state: list[Tensor]

    def bring(self) -> bool:
        """Returns whether memory is short: the kernel had dropped something. It is the visit's last
        call.
        """
        coming: list[tuple[Files | MappedFiles, Tensor, bool]] = [
            *((self.place, tensor, True) for tensor in self.values),
            *((self.place, tensor, False) for tensor in self.gradients),
            *((self.files, tensor, True) for tensor in self.state),
        ]
        was_away = any(where.is_away(tensor) for where, tensor, _ in coming)
        self.place.note_short(was_away)
        for where, tensor, _ in coming if was_away else ():  # the disk gets all orders at once
            where.read_ahead(tensor)
        for where, tensor, to_write in coming:
            where.bring(tensor, to_write=to_write)
        # a thread that is late with forgetting the visit holds no gradients: the next ones would
        # need other files
        self.values.clear()
        self.gradients.clear()
        return was_away

    def let_go(self) -> None:
        for tensor in self.values:
            self.place.rest(tensor)
        self.place.rest_gradients()
        for tensor in self.state:
            self.files.rest(tensor)

    def write(self) -> None:
        """
        Raises:
            OSError: Something can't be written.
        """
        try:
            for tensor in self.values:
                self.place.write(tensor)
            for tensor in self.state:
                self.files.write(tensor, wait=True)
        except OSError as error:
            raise OSError(
                error.errno,
                f"what an optimizer's step has made of layer {self.layer} may be lost: "
                f"{error.strerror or error}. Begin again, from the last checkpoint, with offload= "
                "a directory on a disk that works",
            ) from error


class Traffic:
    """One thread brings visits in and lets them go, in the order of the calls. Another one writes,
    if memory is short.

    Memory is short if what a visit needs was dropped since the last step. Then the kernel would
    have to write what has changed before it can drop that for something else, and whoever asked for
    memory would wait. So the disk gets it as soon as it has changed. If memory is not short,
    nothing needs to go to the disk, ever.
    """

    def __init__(self) -> None:
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="zero3-offload")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="zero3-offload-writer")
        self._writing: deque[Future[None]] = deque()  # of the mover
        self._was_short = self._is_short = False  # in the last step, or in this one

    def bring(self, visit: Visit) -> Future[None]:
        return self._mover.submit(self._bring, visit)

    def _bring(self, visit: Visit) -> None:
        self._land(but=_BEING_WRITTEN - 1)
        self._is_short |= visit.bring()

    def _land(self, but: int) -> None:
        """Waits for the oldest writes, until no more than `but` are left. One that has failed
        stays, so it is every later call's error.
        """
        while len(self._writing) > but or (self._writing and self._writing[0].done()):
            self._writing[0].result()
            self._writing.popleft()

    def land(self) -> None:
        """Returns when nothing that has left is still to be written.

        Raises:
            OSError: Something could not be written.
        """
        self._mover.submit(self._land, but=0).result()

    def let_go(self, visit: Visit) -> Future[None]:
        return self._mover.submit(self._let_go, visit)

    def _let_go(self, visit: Visit) -> None:
        visit.let_go()
        if self._is_short or self._was_short:
            self._writing.append(self._writer.submit(visit.write))

    def end_step(self) -> Future[None]:
        return self._mover.submit(self._end_step)

    def _end_step(self) -> None:
        self._was_short, self._is_short = self._is_short, False
