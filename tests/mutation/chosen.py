"""Faults that were chosen by hand: each breaks a promise that is easily broken, and names the tests that should see it."""

from __future__ import annotations

from typing import NamedTuple

from tests.mutation.coverage_map import CoverageMap
from tests.mutation.tree import ROOT, Tree
from tests.mutation.verdicts import NOT_RUN, Verdict, judge


class Fault(NamedTuple):
    name: str
    file: str  # in zero3/
    right: str
    wrong: str
    tests: str  # files of tests/ that should see it, the likeliest first


FAULTS = [
    Fault(
        "rows of tokens are used before they have come",
        "experts/at_home.py",
        "        self._among.all_to_all(into.view(-1), flat.view(-1), bounds, places).wait()\n",
        "        self._among.all_to_all(into.view(-1), flat.view(-1), bounds, places)\n",
        "experts/expert_parallel",
    ),
    Fault(
        "a bucket keeps what the next layer is read over",
        "huggingface/weights.py",
        "            if numbers[output.name] == numbers[outputs[-1].name]\n            and",
        "            if",
        "huggingface/stream_weights",
    ),
    Fault(
        "counts of tokens are read before they have come",
        "experts/at_home.py",
        "        self._among.all_to_all(received, words).wait()\n",
        "        self._among.all_to_all(received, words)\n",
        "experts/expert_parallel",
    ),
    Fault(
        "a rank without tokens stops its recomputation early",
        "experts/at_home.py",
        "        ctx.save_for_backward(row)\n",
        "        ctx.save_for_backward(*[row] * bool(len(row)))\n",
        "experts/expert_parallel",
    ),
    Fault(
        "experts' gradients are a sum for a mean",
        "build/axes.py",
        'mean = landed_dtype(policy, stored), policy.gradient_reduction == "mean"',
        'mean = landed_dtype(policy, stored), policy.gradient_reduction == "mean" and not chunk.in_part',
        "experts/expert_parallel",
    ),
    Fault(
        "compute does not wait for a gather",
        "core/chunk.py",
        "            now.ticket.wait()\n",
        "",
        "core/no_sync",
    ),
    Fault(
        "the fetch lane does not wait for compute",
        "comm/streams.py",
        "self._stream.wait_stream(",
        "(lambda stream: None)(",
        "core/ordering",
    ),
    Fault(
        "no wait for reductions at the end",
        "core/backward.py",
        "                self._back_up(state)\n        self.reductions.settle(self._stack.layers[0])\n",
        "                self._back_up(state)\n",
        "core/no_sync",
    ),
    Fault(
        "a sum over replicas begins when a wait happens to end",
        "core/ticket.py",
        "leg.mark = lane.defer(begin)",
        "leg.mark = begin()",
        "uneven/joinable",
    ),
    Fault(
        "a sum for a mean",
        "core/flow.py",
        "if self._mean else 1",
        "if False else 1",
        "core/no_sync",
    ),
    Fault(
        "a mean of fewer ranks is one of all",
        "core/flow.py",
        "gradient.account.among.averaged_over / self._divided",
        "max(gradient.account.among.averaged_over, self._divided) / self._divided",
        "core/gradient_reduction_averages",
    ),
    Fault(
        "a mean is divided once more",
        "build/axes.py",
        "divided = communicator.world_size if averaged else first",
        "divided = first",
        "core/gradient_reduction_averages",
    ),
    Fault(
        "three ranks' sums are NCCL's mean, too",
        "build/axes.py",
        "    averaged = averaged and averages(communicator)\n",
        "    averaged = averaged and hasattr(communicator, 'averages')\n",
        "core/gradient_reduction_averages",
    ),
    Fault(
        "a layer's full buffer is given back behind the buffer of its gradients",
        "core/backward.py",
        "        for each in (state, *step.call.layers):\n            self.release(each)\n"
        "        only = self.reach.only\n"
        "        if step.reduce and trace.reduces and (only is None or state in only):\n            self._back_up(state)\n",
        "        only = self.reach.only\n"
        "        if step.reduce and trace.reduces and (only is None or state in only):\n            self._back_up(state)\n"
        "        for each in (state, *step.call.layers):\n            self.release(each)\n",
        "core/memory",
    ),
    Fault(
        "a linear layer is not gathered for its backward",
        "build/construction.py",
        "    if type(module) is not nn.Embedding or",
        "    if type(module) is nn.Linear:\n        return False\n    if type(module) is not nn.Embedding or",
        "core/embeddings",
    ),
    Fault(
        "an embedding in a checkpoint is gathered by its recomputation alone",
        "core/runtime.py",
        "            or checkpoint_around() is not None\n",
        "",
        "core/embeddings",
    ),
    Fault(
        "each rank looks at its own hooks of an embedding",
        "build/construction.py",
        "any(each[IDENTITY_BYTES] & _READS for each in notes)",
        "self.reads",
        "core/embeddings",
    ),
    Fault(
        "padding not zeroed",
        "core/gradient_buffer.py",
        "if self.missing or spots[-1]:  # padding",
        "if self.missing:",
        "core/random_models",
    ),
    Fault(
        "slots without gradients not zeroed",
        "core/gradient_buffer.py",
        "                    full.as_strided(*spot.strided).zero_()",
        "                    pass",
        "core/paths",
    ),
    Fault(
        "a second micro-batch overwrites",
        "core/chunk_gradient.py",
        "        parameter.grad.add_(gradient)",
        "        parameter.grad.copy_(gradient)",
        "core/no_sync",
    ),
    Fault(
        "a layer's second gradient takes the first's place",
        "core/gradient_buffer.py",
        "        if index in self.came:\n            self.flat()\n",
        "",
        "core/recomputation",
    ),
    Fault(
        "a gradient used twice overwrites", "core/gradient_buffer.py", "place.add_(gradient) if", "place.copy_(gradient) if", "core/no_sync"
    ),
    Fault(
        "what other ranks have reached is not read",
        "core/reached.py",
        "if told is not None and not told.is_meta:",
        "if False:",
        "core/unreached",
    ),
    Fault(
        "a trailer says that every slot was reached",
        "core/gradient_buffer.py",
        "known = [slot in self.came or slot in self.written for",
        "known = [True for",
        "core/unreached",
    ),
    Fault(
        "a slot that only another replica has reached counts as unreached",
        "stages/replicas.py",
        "communicator.sum_replicas(gradient.summed)",
        "communicator.sum_replicas(gradient.summed[: gradient.account.chunk.shard.numel()])",
        "core/unreached",
    ),
    Fault(
        "a gradient that no slot was reached by stays zero",
        "core/account.py",
        "                part.parameter.grad = None\n        self.unreached.forget()",
        "                pass\n        self.unreached.forget()",
        "core/unreached",
    ),
    Fault(
        "elements that no gradient reached are stepped",
        "guards/unreached.py",
        "                new.copy_(torch.where(",
        "                (torch.where(",
        "core/unreached",
    ),
    Fault(
        "the bytes behind a compressed row are not added up",
        "wires/coded.py",
        "    torch.sum(trailers, 0, dtype=total.dtype, out=trailer)",
        "    trailer.copy_(trailers[0])",
        "core/unreached",
    ),
    Fault(
        "a chunk's reduction skipped",
        "core/layer_gradients.py",
        "            if chunk.shard.requires_grad or account.owed\n        ]",
        "            if chunk.shard.requires_grad or account.owed\n        ][1:]",
        "core/no_sync",
    ),
    Fault(
        "a kept layer outlives a step",
        "pinning.py",
        "    state.release()  # the values of a kept layer",
        "    # the values of a kept layer",
        "core/exceptions",
    ),
    Fault(
        "a new forward trusts what is left",
        "core/runtime.py",
        "            self.reset(broken=False)\n",
        "            pass\n",
        "core/exceptions",
    ),
    Fault("stale graphs pass", "core/layer_state.py", "list(filter(Chunk.changed, self.chunks))", "[]", "core/exceptions"),
    Fault(
        "a broken backward leaves its half",
        "core/backward.py",
        "            account.give_up()",
        "            pass",
        "core/exceptions",
    ),
    Fault(
        "full buffers are never given back",
        "core/full_buffer.py",
        "free(self) -> None:\n        self.filled = False\n        self._storage.resize_(0)",
        "free(self) -> None:\n        self.filled = False",
        "core/memory",
    ),
    Fault(
        "what is parked stays on the device",
        "core/full_buffer.py",
        "give_back(self) -> None:\n        self._storage.resize_(0)",
        "give_back(self) -> None:\n        pass",
        "offload/parked",
    ),
    Fault(
        "a rank that stops a stream leaves the others alone",
        "huggingface/stream_weights.py",
        "            for _ in self._tensors:\n                pass\n",
        "            self._tensors = iter(())\n",
        "huggingface/stream_weights_ends",
    ),
    Fault(
        "full buffers of before a step are streamed",
        "huggingface/stream_weights.py",
        "walk.find(c for number, c in enumerate(stays) if not stale",
        "walk.find(c for number, c in enumerate(stays) if stale",
        "huggingface/stream_weights",
    ),
    Fault(
        "prefetch goes one further",
        "core/schedule.py",
        "self.calls.upcoming(self._depth)",
        "self.calls.upcoming(self._depth + 1)",
        "core/memory core/counts",
    ),
    Fault(
        "ranks never find a difference",
        "comm/agreement.py",
        "        if len({digests[rank] for rank in present}) <= 1 and not any(",
        "        if True or not any(",
        "comm/agreement",
    ),
    Fault("messages carry no layer", "comm/gloo.py", "4 * self.channel + kind", "kind", "comm/faults"),
    Fault(
        "a rank's share left out of sums",
        "comm/gloo.py",
        "for summand in rest:",
        "for summand in rest[1:]:",
        "core/training_processes comm/collectives",
    ),
    Fault(
        "a place is used again before all have read it",
        "comm/shared_memory/host_memory.py",
        "            if all(outbox.is_signed(place, rank)",
        "            if True or all(outbox.is_signed(place, rank)",
        "comm/collectives comm/shared_memory",
    ),
    Fault(
        "transfers of a layer are found in any order",
        "comm/shared_memory/host_memory.py",
        " and header[at + 2] == turn",
        "",
        "comm/collectives comm/shared_memory",
    ),
    Fault(
        "a norm of one rank's slice",
        "optim/norms.py",
        "            powers.abs_().view(torch.int64) if maximum else powers, maximum=maximum",
        "            powers.clone(), maximum=maximum",
        "optim/clip_grad_norm",
    ),
    Fault(
        "each model has a history of its own",
        "comm/communicator.py",
        '    return getattr(communicator, "history", None) or History()',
        "    return History()",
        "core/several_models",
    ),
    Fault(
        "a model is blamed for what came before it",
        "comm/log.py",
        "        self._before = history.fold()",
        "        self._before = (0, 0)",
        "core/several_models",
    ),
    Fault(
        "another model's norm",
        "optim/norms.py",
        "    if own and found.flatten().tolist() != [each if maximum else each * ranks for each in own]:",
        "    if False:",
        "core/several_models",
    ),
    Fault(
        "a parameter's memory in another order",
        "zero1/division.py",
        "        elif not self.shaped and not _lies_as(values, self._strides):",
        "        elif False:",
        "zero1/zero_redundancy_optimizer_use",
    ),
    Fault(
        "kept gradients survive zero_grad",
        "core/account.py",
        "            if found is not left or (",
        "            if False and (",
        "core/no_sync",
    ),
    Fault(
        "a transaction that is not taken back",
        "core/account.py",
        "        self._buffer, self._kept = saved.buffer, saved.kept\n        self.owed, self.partial = saved.owed, saved.partial\n",
        "",
        "resilience/step_guard",
    ),
    Fault(
        "a guard that asks nobody",
        "resilience/replay.py",
        "enumerate(told) if each is not None}",
        "enumerate(told) if each is not None and rank == self.rank}",
        "resilience/step_guard",
    ),
    Fault(
        "a rank that fails leaves at once",
        "resilience/step_guard.py",
        "            replay.make_the_rest()",
        "            pass",
        "resilience/step_guard",
    ),
    Fault(
        "a layer given back while it is filled",
        "core/chunk.py",
        "        if self.gathering.ticket is not None or self.gathering.room is not None:\n            self.finish_fetch()\n",
        "",
        "core/ordering_fuzz",
    ),
]


def path_of(test: str) -> str:
    """`core/no_sync` -> its file."""
    folder, _, name = test.rpartition("/")
    return f"tests/{folder}/test_{name}.py"


def tests_of(fault: Fault) -> list[str]:
    return [path_of(test) for test in fault.tests.split()]


def verdict_of(fault: Fault, tree: Tree, lines: CoverageMap) -> Verdict:
    right = (ROOT / "zero3" / fault.file).read_text()
    if right.count(fault.right) != 1:
        return Verdict(NOT_RUN, f"the fault no longer applies: its text stands {right.count(fault.right)} times in zero3/{fault.file}")
    missing = [test for test in tests_of(fault) if not (ROOT / test).is_file()]
    if missing:
        return Verdict(NOT_RUN, f"there is no {missing[0]}")
    return judge(tree, lines, fault.file, right.replace(fault.right, fault.wrong).encode(), lines.of_files(tests_of(fault)))
