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
    Fault(
        "the fetch lane does not wait for compute",
        "core/ticket.py",
        "            with lane.issue():\n                leg.mark",
        "            with lane._stream:\n                leg.mark",
    ),
    Fault(
        "the backup lane does not wait for compute",
        "core/flow.py",
        '        if mover.lane == "backup":\n',
        '        if mover.lane == "backup":\n            gradient.lanes.backup.issue = lambda: gradient.lanes.backup._stream\n',
    ),
    Fault(
        "the layer computes without waiting for its gather",
        "core/chunk.py",
        "            now.ticket.wait()\n",
        "",
    ),
    Fault(
        "the optimizer steps without waiting for reductions",
        "core/backward.py",
        "                self._back_up(state)\n        self.reductions.settle(self._stack.layers[0])\n",
        "                self._back_up(state)\n        self.reductions.under_way.clear()\n",
    ),
    Fault(
        "a reduction's buffers are given back at once",
        "core/ticket.py",
        "        leg = _Leg([held])\n        self._legs.append(leg)  # first",
        "        leg = _Leg([])\n        self._legs.append(leg)  # first",
    ),
    Fault(
        "a gradient that is being added to is given back at once",
        "core/flow.py",
        "Ticket(names, [part.parameter.grad for part in gradient.account.chunk.parts])",
        "Ticket(names, [])",
        "gradients_zeroed_after_an_exception",
    ),
    Fault(
        "a gradient that a sum over replicas is being added to is given back at once",
        "core/ticket.py",
        "        self._legs.popleft()\n        return",
        "        self._legs.popleft()\n        self._into = None\n        return",
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
        "        first.chunks.lanes.end_before(self)\n",
        "",
        "a_model_deleted_after_an_exception",
    ),
    Fault(
        "the full buffer is allocated on another stream",
        "core/chunk.py",
        "            full.allocate()\n",
        "            with torch.Stream(self.shard.device):\n                full.allocate()\n",
    ),
    Fault(
        "a lane's event is recorded before the sum lands",
        "comm/streams.py",
        _LANDS + _RECORDS,
        _RECORDS + _LANDS,
        "two_forwards_before_one_backward",
    ),
    Fault(
        "the sum lands beside its lane",
        "core/flow.py",
        "        for stage in self._legs[number][1:]:\n            stage(gradient)\n",
        "        with torch.Stream(gradient.account.chunk.device):\n"
        "            for stage in self._legs[number][1:]:\n                stage(gradient)\n",
        "compressed_exception_and_on",
    ),
    Fault(
        "an earlier reduction is dropped, not waited for",
        "core/backward.py",
        "            self._wait_for_one()\n        with state.spans.backup",
        "            self.under_way.popleft()\n        with state.spans.backup",
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
        "        if self.gathering.ticket is not None or self.gathering.room is not None:\n            self.finish_fetch()\n",
        "        self.gathering.ticket = None\n",
        "memory_after_another_path",
    ),
    Fault(
        "a reset does not wait for reductions",
        "core/backward.py",
        "                self.reductions.drain()\n            except",
        "                self.reductions.under_way.clear()\n            except",
        "compressed_exception_and_on",
    ),
    Fault(
        "kept gradients are reduced without a wait at the end",
        "core/backward.py",
        "                self._back_up(state, whole=True)\n        self.reductions.settle(self._stack.layers[0])\n",
        "                self._back_up(state, whole=True)\n        self.reductions.under_way.clear()\n",
        "stage_1",
    ),
    Fault(
        "a sum over replicas does not wait for the reduction",
        "core/ticket.py",
        "            with lane.issue():  # this lane",
        "            with lane._stream:  # this lane",
        "mesh",
    ),
    Fault(
        "the optimizer steps without waiting for sums over replicas",
        "core/backward.py",
        "            oldest = self.later.popleft()\n            if oldest.advance():\n",
        "            oldest = self.later.popleft()\n            if False:\n",
        "mesh",
    ),
    Fault(
        "the buffers of a sum over replicas are given back at once",
        "core/flow.py",
        "ticket.follow(cast(Lane, gradient.lanes.replicas), start, behind, held)",
        "ticket.follow(cast(Lane, gradient.lanes.replicas), start, behind, None)",
        "mesh_no_sync",
    ),
    Fault(
        "what a replica has kept is given back while its lane reads it",
        "stages/replicas.py",
        "            gradient.ticket().keep_alive(earlier)  # the lane reads it\n",
        "",
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
        "core/chunk.py",
        "            room,\n        )\n",
        "            None,\n        )\n        now.room = None\n        ticket._legs[-1].mark.__class__\n",
        "compressed",
    ),
    Fault(
        "what a gather brings is allocated on another stream",
        "core/chunk.py",
        "                now.room = now.wire.room(self, full.tensor, now.among)\n",
        "                with torch.Stream(self.shard.device):\n"
        "                    now.room = now.wire.room(self, full.tensor, now.among)\n",
        "compressed",
    ),
    Fault(
        "gradients' codes are given back at once",
        "core/flow.py",
        "(*held, gradient.full, gradient.work)",
        "(*held, gradient.full)",
        "compressed",
    ),
    Fault(
        "gradients are given back while they are encoded",
        "core/flow.py",
        "(*held, gradient.full, gradient.work)",
        "(*held, gradient.work)",
        "compressed",
    ),
    Fault(
        "a sum over replicas does not wait until gradients are decoded",
        "core/ticket.py",
        "            with lane.issue():  # this lane",
        "            with lane._stream:  # this lane",
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
        "lane has finished with it\n        self._settle()\n",
        "lane has finished with it\n        pass\n",
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
        "stores/resting.py",
        "copy.tensor() for copy in self._copies",
        "copy._copy for copy in self._copies",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a gradient is copied to the host beside its lane",
        "stores/resting.py",
        "        exact = gradient.exact\n",
        "        torch.Stream(gradient.account.chunk.device).__enter__()\n        exact = gradient.exact\n",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a gradient's buffers are given back before it is on the host",
        "core/ticket.py",
        "                leg.mark.wait()\n",
        "                pass\n",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a chunk is copied to the device beside the fetch lane",
        "stores/pinned.py",
        "            into.copy_(values, non_blocking=True)\n",
        "            with torch.Stream(into.device):\n                into.copy_(values, non_blocking=True)\n",
        "offload_to_cpu_shard",
    ),
    Fault(
        "the memory in which a chunk is cast is given back at once",
        "core/chunk.py",
        "            values = chunk.store.lend(values, room.lent)\n        return values if",
        "            values = chunk.store.lend(values, room.lent)\n        own, received = room.own, room.received\n"
        "        chunk.gathering.room, chunk.gathering.ticket._legs[-1].held = None, []\n"
        "        room = room._replace(lent=None)\n        return values if",
        "offload_to_cpu_bf16",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a forward",
        "core/runtime.py",
        "                self.backward.resting.settle(before_backward=self.awaits_backward)\n",
        "                pass\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "whoever asks for a chunk's values before the backward does not wait",
        "stores/resting.py",
        "        self.first()\n",
        "",
        "offload_and_a_forward_that_nobody_walks",
    ),
    Fault(
        "whoever asks for the values of pieces before the backward does not wait",
        "stores/resting.py",
        "(chunk.shard, *(part.parameter for part in chunk.parts))",
        "(chunk.shard,)",
        "offload_and_pieces_after_a_forward_that_nobody_walks",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a forward with gradients",
        "stores/pinned.py",
        "            self._watched = watch_values(chunk, self._read.synchronize)\n",
        "            pass\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a backward that raised",
        "core/backward.py",
        "            self.resting.settle()  # its end has not\n",
        "            pass\n",
        "offload_and_a_write_after_a_backward_that_raised",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a backward",
        "core/backward.py",
        "            self.resting.settle()\n        self.order.learn()\n",
        "            pass\n        self.order.learn()\n",
        "offload_and_a_frozen_first_layer",
    ),
    Fault(
        "the host writes a chunk that is being copied, after full_params",
        "core/layer_state.py",
        "            self.settle()\n",
        "            pass\n",
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
    Fault(
        "tokens travel beside compute",
        "experts/at_home.py",
        "        self._among.all_to_all(into.view(-1), flat.view(-1), bounds, places).wait()\n",
        "        with torch.Stream(flat.device):\n"
        "            self._among.all_to_all(into.view(-1), flat.view(-1), bounds, places).wait()\n",
        "experts_at_home",
    ),
    Fault(
        "counts of tokens travel beside compute",
        "experts/at_home.py",
        "        self._among.all_to_all(received, words).wait()\n        found: list[list[int]] = torch.stack([words, received])",
        # what is read then is any number, and memory is taken for so many rows: 1023 at most
        "        with torch.Stream(words.device):\n"
        "            self._among.all_to_all(received, words).wait()\n"
        "        received = received & (1023 | 1023 << _PAIRS | 255 << _LENGTHS | 1 << _NEEDS)\n"
        "        found: list[list[int]] = torch.stack([words, received])",
        "experts_at_home",
    ),
]
