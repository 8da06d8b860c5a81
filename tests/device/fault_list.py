"""Waits, holds and orders that can be taken out of zero3, as edits of its text."""

from __future__ import annotations

from typing import NamedTuple

ELSEWHERE = "shard, on a device that is not current"  # a scenario


class Fault(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    scenario: str = "prefetch_depth_1"


_LANDS = "        if then is not None:\n            then()\n"
_RECORDS = "        event = torch.Event(self._stream.device)\n        event.record(self._stream)\n"
FAULTS = [
    Fault("the fetch lane does not wait for compute", "core/chunk.py", "        with lane.issue():\n", "        with lane._stream:\n"),
    Fault(
        "the backup lane does not wait for compute",
        "core/gradient_reducer.py",
        "        with lane.issue():\n",
        "        with lane._stream:\n",
    ),
    Fault("the layer computes without waiting for its gather", "core/chunk.py", "            self._in_flight.wait()\n", ""),
    Fault(
        "the optimizer steps without waiting for reductions",
        "core/backward.py",
        "                self._back_up(state)\n        self._settle()\n",
        "                self._back_up(state)\n        self._backups.clear()\n",
    ),
    Fault(
        "a reduction's buffers are given back at once",
        "core/gradient_reducer.py",
        "(sending.travelling, summed, landed), into",
        "(), into",
    ),
    Fault(
        "a gradient that is being added to is given back at once",
        "core/gradient_reducer.py",
        "into = [part.parameter.grad for part in self._chunk.parts]",
        "into = ()",
        "gradients_zeroed_after_an_exception",
    ),
    Fault(
        "a gradient that a sum over replicas is being added to is given back at once",
        "core/gradient_reducer.py",
        "(Backup(later, (), self.into, self.naming),)",
        "(Backup(later, (), (), self.naming),)",
        "mesh_gradients_zeroed_after_an_exception",
    ),
    Fault(
        "compute waits for a deleted model's reductions before these wait for their sums over replicas",
        "comm/streams.py",
        "        for lane in reversed(lanes):",
        "        for lane in lanes:",
        "mesh_a_model_deleted_after_an_exception",
    ),
    Fault(
        "a deleted model's buffers are given back at once",
        "core/runtime.py",
        "        first.lanes.end_before(self)\n",
        "",
        "a_model_deleted_after_an_exception",
    ),
    Fault(
        "the full buffer is allocated on another stream",
        "core/chunk.py",
        "        self.full.allocate()\n",
        "        with torch.Stream(self.shard.device):\n            self.full.allocate()\n",
    ),
    Fault(
        "a lane's event is recorded before the sum lands",
        "comm/streams.py",
        _LANDS + _RECORDS,
        _RECORDS + _LANDS,
    ),
    Fault(
        "the sum lands beside its lane",
        "core/gradient_reducer.py",
        "            mark = lane.complete(pending, lambda: self._land(summed, landed))\n",
        "            mark = lane.complete(pending)\n        self._land(summed, landed)\n",
    ),
    Fault(
        "an earlier reduction is dropped, not waited for",
        "core/backward.py",
        "            self._later.extend(self._backups.popleft().wait())\n        with state.backup_span",
        "            self._backups.popleft()\n        with state.backup_span",
    ),
    Fault(
        "compute waits on the current device, not on the model's",
        "comm/streams.py",
        "torch.accelerator.current_stream(self._device).wait_event",
        "torch.accelerator.current_stream().wait_event",
        ELSEWHERE,
    ),
    Fault(
        "a lane waits for the current device, not for the model's",
        "comm/streams.py",
        "self._before = torch.accelerator.current_stream(self._stream.device)",
        "self._before = torch.accelerator.current_stream()",
        ELSEWHERE,
    ),
    Fault(
        "a buffer is given back while it is filled",
        "core/chunk.py",
        "    def release(self) -> None:\n        self.finish_fetch()\n",
        "    def release(self) -> None:\n        self._in_flight = None\n",
        "another_path",
    ),
    Fault(
        "a reset does not wait for reductions",
        "core/backward.py",
        "                self.drain_backups()\n            except",
        "                self._backups.clear()\n            except",
        "an_exception_and_on",
    ),
    Fault(
        "kept gradients are reduced without a wait at the end",
        "core/backward.py",
        "                self._back_up(state, whole=True)\n        self._settle()\n",
        "                self._back_up(state, whole=True)\n        self._backups.clear()\n",
        "stage_1",
    ),
    Fault(
        "a sum over replicas does not wait for the reduction",
        "core/replicas.py",
        "            with lane.issue():",
        "            with lane._stream:",
        "mesh",
    ),
    Fault(
        "the optimizer steps without waiting for sums over replicas",
        "core/backward.py",
        "        while self._later:\n            self._later.extend(self._later.popleft().wait())\n",
        "        self._later.clear()\n",
        "mesh",
    ),
    Fault(
        "the buffers of a sum over replicas are given back at once",
        "core/replicas.py",
        "_Later(lane.defer(begin), (summed, landed))",
        "_Later(lane.defer(begin), ())",
        "mesh_no_sync",
    ),
    Fault(
        "what a replica has kept is given back while its lane reads it",
        "core/replicas.py",
        "        return self.later\n",
        "        return self.later\n\n    def __setattr__(self, name: str, value: object) -> None:\n        if name != 'earlier':\n"
        "            object.__setattr__(self, name, value)\n",
        "mesh_no_sync",
    ),
    Fault(
        "the ranks' hashes are read before they have come",
        "comm/streams.py",
        "            self._made.synchronize()\n",
        "            pass\n",
    ),
    Fault(
        "what a gather brings is given back before it is decoded",
        "core/compressed.py",
        "        room = self._room or self._new_room()\n",
        "        room, self._room = self._room or self._new_room(), None\n",
        "compressed",
    ),
    Fault(
        "what a gather brings is allocated on another stream",
        "core/compressed.py",
        "            self._room = self._new_room()\n",
        "            with torch.Stream(self.shard.device):\n                self._room = self._new_room()\n",
        "compressed",
    ),
    Fault(
        "gradients' codes are given back at once",
        "core/compressed.py",
        "        self.travelling = full, self._sent, self._received, self._work\n",
        "        self.travelling = full\n",
        "compressed",
    ),
    Fault(
        "gradients are given back while they are encoded",
        "core/compressed.py",
        "        self.travelling = full, self._sent",
        "        self.travelling = self._sent",
        "compressed",
    ),
    Fault(
        "a sum over replicas does not wait until gradients are decoded",
        "core/replicas.py",
        "            with lane.issue():",
        "            with lane._stream:",
        "mesh_compressed",
    ),
    Fault(
        "an activation is used before it is back, and freed before it is out",
        "offload/rests.py",
        "        if self._mark is not None:\n            self._mark.wait()\n        busy",
        "        busy",
        "offload_activations",
    ),
    Fault(
        "a graph is dropped while activations come back",
        "offload/rests.py",
        "        self._settle()  # else compute would",
        "        pass  # else compute would",
        "offload_activations",
    ),
    Fault(
        "a file's activation is written before it is on the host",
        "offload/rests.py",
        "            host = copy.tensor()\n",
        "            host = copy._copy\n",
        "offload_activations_to_a_file",
    ),
    Fault(
        "the host takes a gradient before it has come",
        "core/offloaded_chunk.py",
        "copies[0].tensor(), copies[-1].tensor()",
        "copies[0]._copy, copies[-1]._copy",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a gradient is copied to the host beside its lane",
        "core/offloaded_chunk.py",
        "        both = (landed, summed)",
        "        torch.Stream(self.device).__enter__()\n        both = (landed, summed)",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a gradient's buffers are given back before it is on the host",
        "core/offloaded_chunk.py",
        "        later = self.mark.wait()\n",
        "        later = None\n",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a chunk is copied to the device beside the fetch lane",
        "core/offloaded_chunk.py",
        "            first.copy_(to_copy, non_blocking=True)\n",
        "            with torch.Stream(self.device):\n                first.copy_(to_copy, non_blocking=True)\n",
        "offload_to_cpu_shard",
    ),
    Fault(
        "the memory in which a chunk is cast is given back at once",
        "core/offloaded_chunk.py",
        "                own.copy_(first)\n",
        "                own.copy_(first)\n            first = self._passing = self._nothing\n",
        "offload_to_cpu_bf16",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a forward",
        "core/runtime.py",
        "                self.backward.offloaded.settle(before_backward=self.awaits_backward)\n",
        "                pass\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "whoever asks for a chunk's values before the backward does not wait",
        "core/offloaded_chunk.py",
        "        self.first()\n",
        "",
        "offload_and_a_forward_that_nobody_walks",
    ),
    Fault(
        "whoever asks for the values of pieces before the backward does not wait",
        "core/offloaded_chunk.py",
        "(self.shard, *(part.parameter for part in self.parts))",
        "(self.shard,)",
        "offload_and_pieces_after_a_forward_that_nobody_walks",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a forward with gradients",
        "core/offloaded_chunk.py",
        "            if before_backward:\n                self._being_copied += chunk.settle_when_asked()\n            else:\n",
        "            if not before_backward:\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a backward that raised",
        "core/backward.py",
        "            self.offloaded.settle()  # its end has not\n",
        "            pass\n",
        "offload_and_a_write_after_a_backward_that_raised",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a backward",
        "core/backward.py",
        "            self.offloaded.settle()\n        self.order.learn()\n",
        "            pass\n        self.order.learn()\n",
        "offload_and_a_frozen_first_layer",
    ),
    Fault(
        "the host writes a chunk that is being copied, after full_params",
        "core/pinning.py",
        "        settle(state)\n",
        "        pass\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "gradients on the host are unscaled by a number that has not come",
        "optim/grad_scaler.py",
        "each.cpu() if self._from_afar(optimizer) else each",
        "each",
        "offload_to_cpu_grad_scaler",
    ),
    Fault(
        "the host copies hashes without an event",
        "comm/streams.py",
        "        if later:\n            self._made = ",
        "        if not later:\n            self._made = ",
    ),
]
