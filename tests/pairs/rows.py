"""The table of axes: every field of `ShardingPolicy`, and every capability that is not one. Rows act in the order in which they stand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.pairs.between import Evaluated, FullParams, Loaded, Parked, Resident, Streamed, Unwalked
from tests.pairs.joining import joined
from tests.pairs.life import FILES, Life, Plain, Row, Sharded, Side, World
from tests.pairs.model import BLOCKS, Data, drawn, is_adapter, is_base
from tests.support import ranks
from tests.support.blocks import BLOCK, InBlocks
from tests.support.models import Broken
from zero3 import Float8, Int8


class Ignored(Row):
    """Users bring what is left alone to the device, and its gradient to all ranks."""

    def builds(self, one: Sharded, model: Any) -> None:
        if not model.scale.is_meta:
            model.scale.data = model.scale.to(one.device)

    def before_step(self, one: Sharded) -> None:
        for p in one.own():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            everywhere(one, gradient)
            p.grad = gradient / one.world_size if one.life.policy.gradient_reduction == "mean" else gradient


def everywhere(one: Sharded, tensor: Tensor) -> None:
    """Sums over all ranks."""
    own = hasattr(one.group, "all_reduce")  # ranks that are threads
    one.group.all_reduce(tensor) if own else torch.distributed.all_reduce(tensor)


class Dynamic(Row):
    """Ranks leave out different blocks."""

    def prepares(self, one: Side, model: Any, rank: int, micro: int) -> None:
        model.skips = {(rank + one.epoch + micro) % BLOCKS}


class Towers(Row):
    """Ranks call a block, or leave it out, as they like; in the last epoch all leave it out."""

    optional = ("blocks.1",)

    def prepares(self, one: Side, model: Any, rank: int, micro: int) -> None:
        model.skips = {1} if one.epoch == one.life.last or (rank + one.epoch + micro) % 2 else set()


class Unreached(Row):
    """No rank's gradient reaches a block in the second epoch, nor a bias in any; one reaches another bias. Nothing decays or drifts."""

    def prepares(self, one: Side, model: Any, rank: int, micro: int) -> None:
        # a guard has to know the exchanges of attention: with parts of sequences the block is left out from the beginning
        model.unused = {1: "block"} if one.epoch == 1 or one.life.parts > 1 else {}
        model.unused |= {2: "bias"} | ({} if rank == one.world_size - 1 else {0: "bias"})

    def optimizer(self, one: Side, optimizer: Any) -> Any:  # type: ignore[override]
        alone = {id(p) for name, p in one.model.named_parameters() if one.is_ignored(name, p)}  # users give it a gradient, of zeros
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0 if alone & set(map(id, group["params"])) else 0.1
        return optimizer

    plain_optimizer = optimizer


class Failing(Row):
    """A micro-batch fails, in the phase and on the ranks that dice say."""

    micro = 0

    def drops(self, life: Life, epoch: int, step: int, micro: int) -> bool:
        return (epoch, micro) == (1, self.micro)  # in every step of the epoch

    def phase(self, life: Life) -> str:
        return life.dice("phase").choice(["forward", "backward"])

    @contextmanager
    def blowing(self, one: Sharded, micro: int, ranks: set[int]) -> Iterator[bool]:
        fails = self.drops(one.life, one.epoch, one.step_number, micro)
        if fails and one.rank in ranks:
            one.model.blows = (self.phase(one.life), Broken)
        try:
            yield fails
        finally:
            one.model.blows = None


class Raising(Failing):
    """On all ranks, before a good micro-batch."""

    words = ("exception",)
    micros = 2

    @contextmanager
    def around(self, one: Sharded, micro: int) -> Iterator[None]:
        raised = True
        with self.blowing(one, micro, set(range(9))) as fails:
            try:
                yield
                raised = False
            except (Broken, RuntimeError) as error:  # with towers, a rank may hear of another's first
                if not fails or "Broken" not in repr(error):
                    raise
        if fails and raised:
            zero3.reset(one.model)


class Transactional(Raising):
    """What is there before a backward raises stays."""

    words = ("transactional",)
    micros, micro = 3, 1

    def phase(self, life: Life) -> str:
        return "backward"


class NoSync(Row):
    micros = 2

    def keeps(self, one: Side, micro: int) -> bool:
        return micro < one.life.micros - 1

    def around(self, one: Sharded, micro: int) -> AbstractContextManager[Any]:
        return zero3.no_sync(one.model) if self.keeps(one, micro) else nullcontext()


class ReplicasOnly(NoSync):
    """Where it stands with `no_sync`, that one covers more."""

    world = (2, 2)
    micros = 2
    tolerance = 1e-8  # sums of what travelled in fp32 are made in another order

    def keeps(self, one: Side, micro: int) -> bool:
        return False  # they are reduced among shards

    def around(self, one: Sharded, micro: int) -> AbstractContextManager[Any]:
        return zero3.no_sync(one.model, replicas_only=True) if micro < one.life.micros - 1 else nullcontext()


class Guarded(Row):
    def around(self, one: Sharded, micro: int) -> AbstractContextManager[Any]:
        return guarded(one, micro)


@contextmanager
def guarded(one: Sharded, micro: int) -> Iterator[None]:
    with zero3.step_guard(one.model) as step:
        yield
    assert step.failed == one.life.drops(one.epoch, one.step_number, micro), step


class Finding(Row):
    """Each micro-batch is one that a batch finder gives: of one row, as far as it knows."""

    words, streams = ("BatchFinder",), True

    def begins(self, one: Sharded) -> None:
        one.notes["finder"] = zero3.BatchFinder(one.model)

    @contextmanager
    def around(self, one: Sharded, micro: int) -> Iterator[None]:
        for found in one.notes["finder"].micro_batches(torch.zeros(1, 1)):
            with found:
                yield
            assert not found.failed


class GuardedFailing(Failing):
    """One rank fails, in the last epoch: by then ranks know what the others do. After uneven steps they have to see each kind of
    micro-batch once more: then it fails in the second step, when the last rank is out of data.
    """

    micros = 2

    def drops(self, life: Life, epoch: int, step: int, micro: int) -> bool:
        return (epoch, step, micro) == (life.last, 0 if life.chosen("steps") is None else 1, 0)

    @contextmanager
    def around(self, one: Sharded, micro: int) -> Iterator[None]:
        steps, ranks = one.life.chosen("steps"), one.world_size
        with (
            guarded(one, micro),
            self.blowing(one, micro, {one.life.dice("rank").randrange(ranks if steps is None or ranks == 1 else ranks - 1)}),
        ):
            yield


class Joined(Row):
    """The last rank has a step less than the others in every epoch."""

    @staticmethod
    def steps(rank: int, world_size: int) -> int:
        return 1 if rank == world_size - 1 else 2

    @contextmanager
    def inside(self, one: Sharded) -> Iterator[None]:
        uneven = joined(one, one.finish)
        with uneven as one.stepping:
            yield
        one.stepping = one.finish


class Scaled(Row):
    """A loss overflows on rank 0: all ranks skip the step."""

    def begins(self, one: Sharded) -> None:
        one.notes["scaler"] = zero3.GradScaler(one.device.type, init_scale=256.0, growth_interval=2)

    def loss(self, one: Side, loss: Tensor, data: Data, rank: int) -> Tensor:
        return loss * float("inf") if (rank, one.epoch) == (0, 1) else loss

    def scales(self, one: Sharded, loss: Tensor) -> Tensor:
        return one.notes["scaler"].scale(loss)

    def before_step(self, one: Sharded) -> None:
        one.notes["scaler"].unscale_(one.optimizer)

    def step(self, one: Sharded) -> bool:
        scaler = one.notes["scaler"]
        scaler.step(one.optimizer)
        scaler.update()
        return True

    def plain_step(self, one: Plain) -> bool:
        return not all(gradient.isfinite().all() for gradient in one.gradients().values())


class Clipped(Row):
    def before_step(self, one: Sharded) -> None:
        one.show("norm", zero3.clip_grad_norm_(one.model, 0.5))

    def plain_before_step(self, one: Plain) -> None:
        norm = nn.utils.clip_grad_norm_(one.model.parameters(), 0.5)
        for rank in range(one.world_size):
            one.show("norm", norm, rank)


class ByName(Row):
    """Gradients are scaled by name."""

    def before_step(self, one: Sharded) -> None:
        scale(zero3.named_gradients(one.model))

    def plain_before_step(self, one: Plain) -> None:
        scale(one.gradients())


class FullGradients(ByName):
    def before_step(self, one: Sharded) -> None:
        with zero3.full_gradients(one.model, writeback=True) as gradients:
            for name, gradient in sorted(gradients.items())[:2]:
                one.show(f"gradient of {name}", gradient)
            scale(gradients)

    def plain_before_step(self, one: Plain) -> None:
        for name, gradient in sorted(one.gradients().items())[:2]:
            for rank in range(one.world_size):
                one.show(f"gradient of {name}", gradient, rank)
        scale(one.gradients())


def scale(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        gradient.mul_(0.5 if name.endswith("bias") else 1.5)


class TokenMean(Row):
    micros, uneven = 2, True

    def loss(self, one: Side, loss: Tensor, data: Data, rank: int) -> Tensor:
        return loss * data.rows

    def backward(self, one: Sharded, loss: Tensor, data: Data) -> None:  # type: ignore[override]
        zero3.backward(loss, data.rows, one.model)

    def plain_weight(self, one: Plain) -> float:
        life, micros = one.life, [micro for micro in range(one.life.micros) if not one.life.drops(one.epoch, one.step_number, micro)]
        tokens = sum(life.data(one.epoch, one.step_number, micro, rank, one.parts).rows for micro in micros for rank in one.ranks())
        return (one.world_size if life.policy.gradient_reduction == "mean" else 1) / tokens


class Again(Row):
    """Two backwards over one graph."""

    def backward(self, one: Sharded, loss: Tensor, data: Data) -> None:  # type: ignore[override]
        (loss * 0.5).backward(retain_graph=True)
        (loss * 0.5).backward()


class Grouped(Row):
    whole = False

    def options(self, name: str, info: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"lr": 0.05 if info.ndim > 1 else 0.1} | ({"whole": info.ndim == 2} if self.whole else {})


class Whole(Grouped):
    whole = True


class Aligned(Grouped):
    """State in blocks of two elements, as libraries have it in blocks of 256."""

    makes = InBlocks

    def options(self, name: str, info: Any) -> dict[str, Any]:
        return {**super().options(name, info), "align": BLOCK}


class SetTrainable(Row):
    """Other parameters train from the second epoch on."""

    def builds(self, one: Sharded, model: Any) -> None:
        if one.chapter:
            self.choose(one, model)

    def between(self, one: Sharded) -> None:
        if one.epoch == 1:
            zero3.set_trainable(one.model, self.chosen)
            one.make_optimizer()

    def plain_between(self, one: Plain) -> None:
        if one.epoch == 1:
            self.choose(one, one.model)
            one.make_optimizer()

    def choose(self, one: Side, model: Any) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(one.is_ignored(name, p) or self.chosen(name, p))

    @staticmethod
    def chosen(name: str, info: Any) -> bool:
        return is_adapter(name) or (name.startswith(("norm", "blocks.0.")) and not is_base(name))


class Listed(Row):
    """Two optimizers as one: the first has one parameter of each group."""

    def optimizer(self, one: Sharded, optimizer: Any) -> Any:
        dealt = [[{**group, "params": group["params"][part]} for group in optimizer.param_groups] for part in (slice(1), slice(1, None))]
        return zero3.OptimizerList(*(type(optimizer)(groups, lr=0.05, momentum=0.5) for groups in dealt))


class OffloadedOptimizer(Row):
    def optimizer(self, one: Sharded, optimizer: Any) -> Any:
        return zero3.offload_optimizer(optimizer)


class InBackward(NoSync):
    """Chunks are stepped in the backward of the last micro-batch. Those before it have to wait."""

    micros = 1

    def optimizer(self, one: Sharded, optimizer: Any) -> Any:
        return zero3.offload_optimizer(optimizer, in_backward=True)

    def plain_before_step(self, one: Plain) -> None:
        one.optimizer.step()

    def plain_step(self, one: Plain) -> bool:
        return True


class OffloadedActivations(Row):
    def around(self, one: Sharded, micro: int) -> AbstractContextManager[Any]:
        return zero3.offload_activations(min_bytes=1)


class Autocast(Row):
    tolerance = 2e-2

    def around(self, one: Sharded, micro: int) -> AbstractContextManager[Any]:
        return torch.autocast(one.device.type, torch.bfloat16)

    def plain_around(self, one: Plain) -> AbstractContextManager[Any]:
        return torch.autocast(one.device.type, torch.bfloat16)


class Compiled(Row):
    """A block; `eager`: traced, and not made into other kernels."""

    def builds(self, one: Sharded, model: Any) -> None:
        model.blocks[1].compile(backend="eager")
        rules = sys.modules["torch._dynamo.trace_rules"]
        if not rules.check_file(ranks.__file__).skipped:  # a real group's functions are torch's, which are not traced either
            rules.add("tests.support.ranks")


class Reloaded(Row):
    """Saved, and loaded by another number of ranks."""

    def worlds(self, first: World) -> list[World]:
        return [{(0, 1): (0, 2), (0, 2): (0, 3), (0, 3): (2, 1), (1, 2): (1, 3), (2, 1): (1, 2), (2, 2): (2, 1)}[first]]

    def ends(self, one: Sharded) -> None:
        zero3.save_checkpoint(one.folder / "checkpoint", one.model, one.optimizer)

    def resumes(self, one: Sharded) -> None:
        zero3.load_checkpoint(one.folder / "checkpoint", one.model, one.optimizer)


class Materialized(Row):
    def begins(self, one: Sharded) -> None:
        zero3.materialize(one.model, init=drawn)

    def plain_begins(self, one: Plain) -> None:
        one.model.apply(drawn)


class Chunked(Row):
    """The loss without logits."""

    chunks = True

    def builds(self, one: Sharded, model: Any) -> None:
        assert callable(zero3.linear_cross_entropy)


class Tiled(Row):
    """A few tokens at a time."""

    def builds(self, one: Sharded, model: Any) -> None:
        for block in model.blocks:
            zero3.tile(block.up, 2)
            zero3.tile(block.down, 1)
        zero3.tile(model.norm, 2)

    def begins(self, one: Sharded) -> None:
        zero3.tile(one.model.head, 2)


class Registered(Row):
    def begins(self, one: Sharded) -> None:
        zero3.register_forward_method(one.model, "encode")

    @staticmethod
    def forward(model: Any, words: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        return model.encode(words, numbers)


class Twice(Row):
    """Two forwards, one backward."""

    micros = 2

    def loss(self, one: Side, loss: Tensor, data: Data, rank: int) -> Tensor:
        model = one.model if isinstance(one, Sharded) else one.now
        return loss + one.measured(model, one.life.data(one.epoch, 9, 0, rank, one.parts))


class Fetched(Row):
    """By hand, and released. Each epoch begins with the same layer fetched: `step_guard` has to know the transfers."""

    def begins(self, one: Sharded) -> None:
        zero3.fetch(one.model.blocks[1])

    def between(self, one: Sharded) -> None:
        zero3.fetch(one.model)
        zero3.release(one.model)
        zero3.fetch(one.model.blocks[1])


class Reported(Row):
    def between(self, one: Sharded) -> None:
        assert zero3.report(one.model).world_size == one.world_size


class Profiled(Row):
    def inside(self, one: Sharded) -> AbstractContextManager[Any]:
        return zero3.profile(one.model) if one.epoch == 1 else nullcontext()


def field(name: str, value: Any, **given: Any) -> Row:
    """A field that has an effect without more."""
    return Row(name, fields={name: value}, **given)


FP32 = 3e-5
STREAMS = {"streams": True}
NF4 = zero3.NF4(block_size=32, select=is_base)
NEAR = {"shape": {"adapted": True}}
AXES: dict[str, dict[str, Row]] = {
    # -- fields
    "param_dtype": {"fp32": field("param_dtype", torch.float32, tolerance=FP32, streams=True)},
    "reduce_dtype": {"fp32": field("reduce_dtype", torch.float32, tolerance=FP32, streams=True)},
    "output_dtype": {"fp32": field("output_dtype", torch.float32, tolerance=FP32)},
    "cast_forward_inputs": {"False": field("cast_forward_inputs", False)},
    "stage": {"1": field("stage", 1, streams=True), "2": field("stage", 2, streams=True)},
    "dynamic": {"True": Dynamic("dynamic", fields={"dynamic": True}, streams=True)},
    "gradient_reduction": {"sum": field("gradient_reduction", "sum")},
    "reshard_after_forward": {"False": field("reshard_after_forward", False, streams=True)},
    "prefetch_depth": {"0": field("prefetch_depth", 0), "2": field("prefetch_depth", 2, streams=True)},
    "separate_backup_group": {"True": field("separate_backup_group", True, streams=True)},
    "transactional": {"True": Transactional(fields={"transactional": True}, streams=True)},
    "compare_every": {"1": field("compare_every", 1)},
    "ignored": {"scale": Ignored("ignored", fields={"ignored": lambda name, info: name == "scale"})},
    "grad_dtype": {"fp32": field("grad_dtype", torch.float32, tolerance=FP32, streams=True)},
    "group_adapters": {"True": Row("group_adapters", **NEAR, streams=True), "False": field("group_adapters", False, **NEAR)},
    "resident_bytes": {"3000": field("resident_bytes", 3000, **NEAR, streams=True)},
    "quantize": {
        "NF4": field("quantize", NF4, words=("quantised",), **NEAR, streams=True),
        "Int8": field("quantize", Int8(block_size=16, select=is_base), words=("quantised",), **NEAR),
    },
    "offload": {"cpu": field("offload", "cpu", streams=True), "DIR": field("offload", FILES, streams=True)},
    "gather_format": {
        "Int8": field("gather_format", Int8(block_size=1), streams=True),
        "Float8": field("gather_format", Float8(block=(1, 1))),
    },
    "reduce_format": {"Int8": field("reduce_format", Int8(block_size=1), tolerance=1e-7, streams=True)},  # scales are fp32
    "master_dtype": {"fp32": field("master_dtype", torch.float32, tolerance=FP32, streams=True)},
    "expert_parallel": {
        "True": field("expert_parallel", True, shape={"experts": True}, streams=True),
        "quantised": Row(fields={"expert_parallel": True, "quantize": NF4}, shape={"experts": True, "adapted": True}, streams=True),
    },
    # -- what is not a field. Contexts around a micro-batch are entered in this order.
    "ranks": {
        "1": Row("ranks", world=(0, 1)),
        "3": Row("ranks", world=(0, 3)),
        "1x2": Row("mesh", world=(1, 2)),
        "2x1": Row("mesh", world=(2, 1)),
        "2x2": Row("mesh", world=(2, 2)),
    },
    "model": {"tied": Row("tied", shape={"tied": True}), "frozen": Row("frozen", shape={"frozen": True})},
    "checkpointing": {
        "reentrant": Row("reentrant", shape={"reentrant": True}),
        "not reentrant": Row("reentrant", shape={"reentrant": False}, streams=True),
    },
    "one checkpoint": {  # around the whole model; on the device the kind that "checkpointing" does not have there
        "reentrant": Row("checkpoint", checkpoint=partial(checkpoint, use_reentrant=True), streams=True),
        "not reentrant": Row("checkpoint", checkpoint=partial(checkpoint, use_reentrant=False)),
    },
    "optional": {"a block": Towers("optional", streams=True)},
    "unreached": {"": Unreached("unreached", streams=True)},
    "compile": {"a block": Compiled("compile")},
    "materialize": {"from meta": Materialized("materialize", shape={"meta": True})},
    "joinable": {"uneven": Joined("joinable", streams=True)},
    "exception": {"on all ranks": Raising(streams=True)},
    "no_sync": {"": NoSync("no_sync", streams=True)},
    "no_sync(replicas_only=True)": {"": ReplicasOnly("replicas_only", streams=True)},
    "OptimizerList": {"": Listed("OptimizerList")},
    "offload_optimizer": {
        "": OffloadedOptimizer("offload_optimizer", fields={"offload": FILES}),
        "in_backward": InBackward("in_backward", fields={"offload": FILES}, streams=True),
    },
    "accumulation": {"2": Row("accumulation", micros=2, streams=True)},
    "step_guard": {
        "quiet": Guarded("step_guard", streams=True),
        "failing": GuardedFailing("step_guard", streams=True),
        "BatchFinder": Finding(),
    },
    "offload_activations": {"cpu": OffloadedActivations("offload_activations", streams=True)},
    "autocast": {"bf16": Autocast("autocast", shape={"dtype": torch.float32})},
    "register_forward_method": {"encode": Registered("register_forward_method")},
    "forwards": {"two": Twice("forward", streams=True)},
    "sequences": {"parts": Row("sp", shape={"attends": True}, parts=2, streams=True)},
    "linear_cross_entropy": {"": Chunked("linear_cross_entropy", streams=True)},
    "tile": {"2": Tiled("tile", streams=True)},
    "backward": {"token mean": TokenMean("backward", streams=True), "twice": Again("backward", streams=True)},
    "GradScaler": {"overflow": Scaled("GradScaler", streams=True)},
    "forward nobody walks": {"": Unwalked("forward", streams=True)},
    "named_gradients": {"scaled": ByName("named_gradients")},
    "full_gradients": {"scaled": FullGradients("full_gradients", streams=True)},
    "clip_grad_norm_": {"0.5": Clipped("clip_grad_norm_", streams=True)},
    "param_groups": {
        "": Grouped("param_groups"),
        "whole": Whole("param_groups", streams=True),
        "align": Aligned("param_groups", streams=True),
    },
    "set_trainable": {"others": SetTrainable("set_trainable")},
    "evaluation": {"no_grad": Evaluated("evaluation", streams=True)},
    "resident": {"evaluation": Resident("resident", streams=True)},
    "full_params": {"writeback": FullParams("full_params", streams=True)},
    "stream_weights": {"": Streamed("stream_weights", streams=True)},
    "parked": {"": Parked("parked", streams=True)},
    "fetch": {"by hand": Fetched("fetch", streams=True)},
    "full_state_dict": {"and back": Loaded("full_state_dict")},
    "save_checkpoint": {"other ranks": Reloaded("save_checkpoint")},
    "report": {"": Reported("report")},
    "profile": {"an epoch": Profiled("profile")},
}
ROWS: dict[str, Row] = {f"{axis} {value}".strip(): row for axis, values in AXES.items() for value, row in values.items()}
AXIS_OF = {name: axis for axis, values in AXES.items() for name in (f"{axis} {value}".strip() for value in values)}
