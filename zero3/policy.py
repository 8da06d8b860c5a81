"""ShardingPolicy: every choice about sharding, and the facts that follow from it. ParamInfo: a
parameter's properties.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Literal

import torch

from .comm.communicator import Communicator
from .comm.plain_values import integer
from .quantized.formats import Float8, Format, Int8

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """A parameter's properties, for the `options` function of `param_groups` and the predicates of
    a policy.

    Attributes:
        name: Its name in the unwrapped model.
        shape: Its shape there.
        numel: The number of its elements.
        dtype: The dtype in which it is stored.
        ndim: The number of its dimensions.

    Example::

        def options(name: str, info: zero3.ParamInfo) -> dict:
            return {"weight_decay": 0.1 if info.ndim > 1 else 0.0}
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    ndim: int


def info_of(name: str, parameter: torch.Tensor) -> ParamInfo:
    """Returns the properties of `parameter`."""
    return ParamInfo(
        name, tuple(parameter.shape), parameter.numel(), parameter.dtype, parameter.ndim
    )


Select = Callable[[str, ParamInfo], bool]


def chosen(what: str, select: Select, name: str, info: ParamInfo) -> bool:
    """Returns what `select`, which the policy calls `what`, says of a parameter.

    Raises:
        ValueError, TypeError: It has raised, or returned something else than True or False.
    """
    try:
        answer = select(name, info)
    except Exception as error:  # whatever it raises: the other ranks have to hear of it
        raise ValueError(
            f"{what}({name!r}) of the policy has raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(answer, bool):
        raise TypeError(
            f"{what}({name!r}) of the policy returned {answer!r}, expected True or False"
        )
    return answer


# of other libraries, mostly
_KEYWORDS = frozenset({"cpu", "gpu", "cuda", "disk", "nvme", "ssd", "none"})


def place_of(place: object, expected: str) -> str:
    """Returns, as text, where something is to rest: `"cpu"` or a directory. `expected`: how errors
    begin.

    Raises:
        TypeError: It is neither.
        ValueError: It is empty, or a text that can only be a mistaken keyword, and no directory.
    """
    text = os.fspath(place) if isinstance(place, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"{expected}, found {place!r}")
    if not text:
        raise ValueError(f"{expected}, found an empty text")
    if (
        isinstance(place, str)
        and text != "cpu"
        and text.lower().partition(":")[0] in _KEYWORDS
        and not os.path.isdir(text)
    ):
        raise ValueError(
            f'{expected}, found {text!r}. Did you mean "cpu", or a directory such as '
            f"{f'./{text}'!r}?"
        )
    return text


@dataclass(frozen=True, slots=True, repr=False)
class ShardingPolicy:
    """Every choice about sharding. It is the same on every rank.

    A wrong value raises when the policy is made. Chunks keep the dtype that the model was wrapped
    in, but for `master_dtype`. They are the master copy, which the optimizer updates and
    checkpoints hold. A chunk is cast before it is sent, so `param_dtype=torch.bfloat16` halves the
    bytes of every gather.

    Layers of a model may have policies of their own. Some fields count for the whole model:
    `dynamic`, `gradient_reduction`, `prefetch_depth`, `separate_backup_group`, `transactional`,
    `compare_every` and `resident_bytes` are the same in all of them. Anything else is a ValueError
    on all ranks that names the field and the layer: from `shard` and `Zero3Sequential`, and at the
    first forward where a plain module calls layers one after another.

    Attributes:
        param_dtype: The dtype in which floating parameters, trainable and frozen, are gathered and
            computed with. None: as stored.
        reduce_dtype: The dtype in which gradients are added up within a backward and over ranks. If
            `chunk.grad` is narrower, micro-batches are added up in `reduce_dtype` too. None:
            `param_dtype` or, without it, the chunk's dtype.
        output_dtype: The dtype that floating tensors of the outputs are cast to. Under `shard` the
            root alone casts. None: no cast.
        cast_forward_inputs: Floating tensors among the arguments are cast to `param_dtype`, if
            there is one.
        stage: What is divided by the number of ranks, besides the optimizer's state (ZeRO's
            stages). 3: parameters and gradients. 2: gradients only. Parameters stay whole, and are
            gathered again only after they have changed; to find that out, each forward compares one
            byte for each chunk between ranks, and the host waits. 1: neither. Backwards add up
            whole gradients, and all of them are reduced when clipping or the optimizer first reads
            one. Stages 1 and 2 take more memory and need less communication.
        dynamic: Ranks may leave out layers that others call (layer drop, early exit, experts as
            layers). Every rank then takes part in the transfers of all layers, in the order of
            layers in the model, and adds zeros to the gradients of layers that it did not call. A
            forward calls each layer at most once, and in that order. Every rank that trains calls
            at least one layer. An activation checkpoint holds one layer, and is not reentrant.
            Ranks compare 16 bytes at the end of each forward.
        gradient_reduction: `"mean"` over ranks, as DDP and FSDP reduce, or `"sum"`.
        reshard_after_forward: Release a layer's full parameters after its forward, and gather them
            again for its backward. False keeps them until then. A step has one gather instead of
            two, but holds the full parameters of all layers.
        prefetch_depth: How many layers may be gathered ahead of the one that computes, and how many
            gradient reductions may be under way (at least one). 0 gathers each layer when it is
            needed, and waits for it.
        separate_backup_group: Reductions have their own communicator, so that on NCCL they do not
            queue behind gathers. It costs one more communicator's buffers. NCCL's authors warn that
            two communicators at work at once may deadlock.
        transactional: If a backward raises, only its own gradients are dropped, and those of
            earlier micro-batches stay. Without it all are dropped. Micro-batches after the first
            hold one more gradient shard. If only one rank may fail, see `step_guard`.
        compare_every: After this many transfers, ranks compare a rolling hash of them at the next
            forward. 0: never. 1: before every gather, to find the first transfer that differs.
            Where messages carry no tag (NCCL), any larger number means every forward, without a
            wait. Under `step_guard` the hash is sent at the end of each micro-batch instead.
        ignored: A function `(name, ParamInfo) -> bool` that says which parameters are left alone.
            They stay ordinary parameters of the model on every rank: not sharded, not moved, not
            made equal between ranks, and their gradients are not reduced. State dicts and
            checkpoints hold them under their names, with rank 0's values. `get_trainable_chunk`,
            `param_groups`, `named_gradients` and `full_gradients` leave them out. What scales,
            clips, drops or takes back gradients does so with each rank's own ones too
            (`clip_grad_norm_`, `backward` over tokens, `step_guard`, `transactional`, a backward
            that raised, `joinable`), so that their mean over ranks is the gradient (with
            `gradient_reduction="sum"` their sum). Inside a `step_guard` their `grad` is None until
            the guard ends. Loss scaling needs `zero3.GradScaler`. Names are those in the model that
            is wrapped. None: no parameter is left alone.
        grad_dtype: The dtype of `chunk.grad`, in which micro-batches are added up, also under
            `no_sync` and at stage 1. The optimizer has to take gradients of that dtype. With it
            autograd also hands over each parameter's gradient in `reduce_dtype`, and not rounded to
            `param_dtype`. None: the chunk's dtype.
        group_adapters: Under `shard`, if less than a sixteenth of a model's elements train
            (adapters), the trainable parameters of all layers belong to the root's own layer. They
            are gathered once and reduced once in each backward, and not layer by layer. `shard`
            decides it once. It needs memory for the full adapters and their full gradients until
            the end of backward. Layers whose policy differs from the root's keep their own. False:
            each layer keeps its own.
        resident_bytes: Full buffers of frozen parameters, at most this many bytes in all on each
            rank, stay from step to step, and are not gathered again: those of the first layers that
            fit, in the order of layers in the model, the root's own layer first. A changed chunk is
            gathered again. To find that out, each forward compares one byte for each of them
            between ranks, and the host waits, as with `stage=2`. Results are the same to the bit.
            All layers of a model share the number. 0: none.
        quantize: The format in which frozen parameters are stored and gathered: `NF4`, `Int8`,
            `Float8` or `MXFP4`. Its `select` says which parameters. Linear layers and experts
            compute with one full matrix at a time, in `param_dtype` or in the parameter's own
            dtype. None: nothing is quantised.
        offload: Where chunks and their gradients rest between their uses. `"cpu"`: in host memory,
            pinned if layers compute on an accelerator. On the CPU that changes nothing. A
            directory, on a local disk: in memory-mapped files without a name, which vanish with the
            process. The directory need not be the same on all hosts. It goes with every format.
            The optimizer then steps on the CPU, as `chunk` and `chunk.grad` are there. On the CPU
            results are the same to the bit. On an accelerator gathers and sums are, and the
            optimizer's step, which then runs on the host, rounds as the host does. None: where
            layers compute.
        gather_format: The format in which trainable chunks travel when they are gathered: `Int8` or
            `Float8` (a block has `block[1]` elements). Each rank quantises its chunk from
            its first element on. What computes, in forward and in backward and on the chunk's owner
            too, is `dequantize(quantize(chunk))` in `param_dtype` or in the chunk's dtype: weights
            rounded to the nearest code, which is a bias. The chunks themselves, which the
            optimizer, state dicts and checkpoints see, stay exact. None: as they are, or cast to
            `param_dtype`.
        reduce_format: The format in which gradients travel to the rank that owns them: `Int8`. Each
            rank quantises what it sends to each owner, itself included, once. The owner adds in
            float32, in rank order, and divides for the mean after that, so `reduce_dtype` is only
            the dtype of gradients before they are sent. Rounding to the nearest code is a bias;
            `Int8(stochastic=True)` has none. Sums over the replicas of a mesh stay exact. None: as
            they are. Where chunks are not cut (one rank, or a mesh with one shard), neither format
            does anything.
        master_dtype: The dtype of trainable floating chunks, which the optimizer updates and
            checkpoints hold. Values are converted once, when the model is sharded. Layers go on
            computing in the parameters' own dtype, unless `param_dtype` says otherwise, and
            gradients are added up in the dtype that layers compute in, unless `reduce_dtype` says
            otherwise. So a bf16 model with `master_dtype=torch.float32` trains as its float32 copy
            does with `param_dtype=torch.bfloat16`, and is loaded and saved (`save_pretrained`) in
            bf16. What `set_trainable` freezes or thaws later keeps its dtype. None: the parameters'
            own dtype.
        expert_parallel: Experts stay on the ranks that own them, and tokens travel. Otherwise all
            experts of a layer are gathered, as everything else is. Experts are a module with an
            integer `num_experts`, which is the first dimension of all of its own parameters, one of
            them with three dimensions, and a forward that takes `(hidden_states [T, H], top_k_index
            [T, k], top_k_weights [T, k])` and returns `[T, H]`. Each rank owns whole experts: of E
            experts and G ranks E // G, the first E % G ranks one more. G is the number of ranks in
            the process group, in `dp_shard` of a mesh `("dp_replicate", "dp_shard")`, or in `ep` of
            a mesh `("dp_shard", "ep")`, whose other dimension cuts the block of experts that its
            ranks share. A token goes once to each rank that owns one of its experts. Every rank has
            to call the model in step, if need be with an empty batch. Names, shapes, state dicts
            and checkpoints are the same as without. It does not go with `dynamic` and with `stage`
            1 or 2.

    Raises:
        ValueError: A value is not allowed, or two options exclude each other.
        TypeError: A value has the wrong type.

    Example::

        policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = [zero3.Zero3Layer(block, policy=policy) for block in blocks]
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    stage: Literal[1, 2, 3] = 3
    dynamic: bool = False
    gradient_reduction: Literal["mean", "sum"] = "mean"
    reshard_after_forward: bool = True
    prefetch_depth: int = 1
    separate_backup_group: bool = False
    transactional: bool = False
    compare_every: int = 1000
    ignored: Select | None = None
    grad_dtype: torch.dtype | None = None
    group_adapters: bool = True
    resident_bytes: int = 0
    quantize: Format | None = None
    offload: str | os.PathLike[str] | None = None
    gather_format: Format | None = None
    reduce_format: Format | None = None
    master_dtype: torch.dtype | None = None
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if (stage := integer(self.stage)) not in (1, 2, 3):  # refuses True and 2.0 too
            raise ValueError(f"stage must be 1, 2 or 3, found {self.stage!r}")
        object.__setattr__(self, "stage", stage)
        if self.gradient_reduction not in ("mean", "sum"):
            raise ValueError(
                f"gradient_reduction must be 'mean' or 'sum', found {self.gradient_reduction!r}"
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "grad_dtype", "master_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype or None, found {dtype!r}")
            if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
                raise ValueError(
                    f"{name} must be a floating dtype of 16 bits or more, found {dtype}"
                )
        for name in (
            "dynamic", "cast_forward_inputs", "reshard_after_forward", "separate_backup_group",
            "transactional", "group_adapters", "expert_parallel",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, found {getattr(self, name)!r}")
        if self.ignored is not None and not callable(self.ignored):
            raise TypeError(
                "ignored must be a function (name, ParamInfo) -> bool or None, found "
                f"{self.ignored!r}"
            )
        self._check_formats()
        self._check_offload()
        if self.transactional and self.stage == 1:
            raise ValueError(
                "transactional=True needs stage 2 or 3: with stage=1 gradients are reduced after "
                "backward"
            )
        for name, other in (("dynamic", self.dynamic), ("stage", self.stage != 3)):
            if self.expert_parallel and other:
                raise ValueError(
                    f"expert_parallel=True and {name}={getattr(self, name)} exclude each other: "
                    "experts are not gathered, and every rank makes the exchanges of every call"
                )
        for name in ("prefetch_depth", "compare_every", "resident_bytes"):
            number = integer(getattr(self, name))
            if number is None:
                raise TypeError(f"{name} must be an integer, found {getattr(self, name)!r}")
            if number < 0:
                raise ValueError(f"{name} must be 0 or more, found {number}")
            object.__setattr__(self, name, number)

    def _check_offload(self) -> None:
        if self.offload is None:
            return
        place_of(self.offload, 'offload must be "cpu", a directory or None')
        # files are made later too, perhaps after the process has changed its directory
        if self.offload != "cpu":
            object.__setattr__(self, "offload", os.path.abspath(self.offload))

    def _check_formats(self) -> None:
        for name, kinds, how in (
            ("quantize", (Format,), "NF4(), Int8(), Float8(), MXFP4()"),
            ("gather_format", (Int8, Float8), "Int8(), Float8()"),
            ("reduce_format", (Int8,), "Int8()"),
        ):
            kind = getattr(self, name)
            if kind is None:
                continue
            if not isinstance(kind, Format):
                raise TypeError(f"{name} must be zero3.{how} or None, found {kind!r}")
            if not isinstance(kind, kinds):
                raise ValueError(
                    f"{name} must be zero3.{how} or None, found {kind!r}: its errors are too "
                    "large for what trains"
                )
            if name != "reduce_format" and isinstance(kind, Int8) and kind.stochastic:
                raise ValueError(
                    f"{name}={kind!r}: stochastic=True is for reduce_format alone. Weights must "
                    "be the same every time"
                )
            if name != "quantize" and kind.select is not None:
                raise ValueError(
                    f"{name}={kind!r}: select= is for quantize alone. All that trains travels in "
                    "one format"
                )

    def __repr__(self) -> str:
        """Shows only the fields that differ from their defaults."""
        chosen = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"ShardingPolicy({', '.join(chosen)})"


# -- facts that follow from a policy; they are not part of the public class

# The fields that say what a whole model does. All its layers have the same.
OF_THE_MODEL = (
    "dynamic", "gradient_reduction", "prefetch_depth", "separate_backup_group", "transactional",
    "compare_every", "resident_bytes",
)  # fmt: skip


def unlike(policies: Iterable[tuple[str, ShardingPolicy]]) -> ValueError | None:
    """The error if layers, each given by its name, differ in a field that counts for the whole
    model. They are compared to the first.
    """
    (first, counts), *others = policies
    for name, policy in others:
        for field in OF_THE_MODEL:
            if getattr(policy, field) != getattr(counts, field):
                return ValueError(
                    f"{name} has {field}={getattr(policy, field)!r}, and {first} has "
                    f"{field}={getattr(counts, field)!r}. It counts for the whole model, so give "
                    "all layers (under zero3.shard also the root, whose name is '') policies "
                    "with the same"
                )
    return None


def shards_parameters(policy: ShardingPolicy) -> bool:
    """Whether a layer's full parameters are released between its computations."""
    return policy.stage == 3


def shards_gradients(policy: ShardingPolicy) -> bool:
    """Whether each backward reduces gradients into chunks."""
    return policy.stage > 1


def dtypes_at_the_edges(policy: ShardingPolicy) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes of a layer's floating inputs and outputs. None: they are not cast."""
    return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def master_dtype(policy: ShardingPolicy, own: torch.dtype) -> torch.dtype:
    """The dtype of the chunk of parameters of dtype `own` that train."""
    chosen = policy.master_dtype
    return chosen if chosen is not None and own.is_floating_point else own


def compute_dtype(policy: ShardingPolicy, own: torch.dtype) -> torch.dtype:
    """The dtype of the full buffer for parameters of dtype `own`."""
    return policy.param_dtype if policy.param_dtype is not None and own.is_floating_point else own


def gradient_dtype(policy: ShardingPolicy, computes: torch.dtype) -> torch.dtype:
    """The dtype of the full gradient, and of its reduction, if layers compute in `computes`."""
    chosen = policy.reduce_dtype
    return chosen if chosen is not None and computes.is_floating_point else computes


def dtypes_kept(
    policy: ShardingPolicy, stored: torch.dtype, computes: torch.dtype
) -> list[torch.dtype]:
    """The dtypes of what is kept of a gradient `[S]`: of itself, and of a wider sum beside it."""
    return list({landed_dtype(policy, stored), added_dtype(policy, stored, computes)})


def rests_in(policy: ShardingPolicy) -> Literal["device", "cpu", "disk"]:
    """Where chunks rest."""
    return "device" if policy.offload is None else "cpu" if policy.offload == "cpu" else "disk"


def directory_of(policy: ShardingPolicy) -> str | None:
    """The directory in whose files chunks rest."""
    place = policy.offload
    return None if place is None or place == "cpu" else os.fspath(place)


def gather_format(
    policy: ShardingPolicy, communicator: Communicator, stored: torch.dtype
) -> Format | None:
    """The format in which a chunk of dtype `stored` is gathered while it trains. None: as it is, or
    cast. One rank alone sends nothing.
    """
    return policy.gather_format if communicator.shards > 1 and stored.is_floating_point else None


def rounding(policy: ShardingPolicy) -> str:
    """For errors: what makes that which computes other than the chunks."""
    chosen = {"param_dtype": policy.param_dtype, "gather_format": policy.gather_format}
    return " and ".join(f"{name}={value}" for name, value in chosen.items() if value is not None)


def reduce_format(
    policy: ShardingPolicy, communicator: Communicator, stored: torch.dtype
) -> Format | None:
    """The format in which the gradients of a chunk of dtype `stored` are sent. None: as they
    are.
    """
    return policy.reduce_format if communicator.shards > 1 and stored.is_floating_point else None


def landed_dtype(policy: ShardingPolicy, stored: torch.dtype) -> torch.dtype:
    """The dtype of the gradient `[S]` of a chunk of dtype `stored`."""
    chosen = policy.grad_dtype
    return chosen if chosen is not None and stored.is_floating_point else stored


def added_dtype(policy: ShardingPolicy, stored: torch.dtype, computes: torch.dtype) -> torch.dtype:
    """The dtype in which the gradients of several backwards are added up: that in which they land,
    or the wider one they come in.
    """
    # such gradients are summed in float32
    in_format = policy.reduce_format is not None and stored.is_floating_point
    reduced = torch.float32 if in_format else gradient_dtype(policy, computes)
    lands = landed_dtype(policy, stored)
    return reduced if reduced.itemsize > lands.itemsize else lands
