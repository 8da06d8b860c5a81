"""plan(): will a training step fit, and what takes its memory."""

from __future__ import annotations

from typing import Any

import torch

from ..policy import ShardingPolicy
from .cluster import Cluster
from .limits import advised, largest_batch, largest_sequence, roomier
from .models import Source, on_paper, unplanned
from .pictures import pictures_for
from .result import Plan
from .setup import Setup
from .trace import OptimizerClass, peak_of
from .units import meant, parse_bytes

__all__: list[str] = []


def plan(
    model_or_directory: Source,
    *,
    ranks: int,
    batch: int = 1,
    sequence: int = 2048,
    policy: ShardingPolicy = ShardingPolicy(),  # noqa: B008 (frozen)
    memory: int | str | None = None,
    checkpointing: bool = False,
    optimizer: OptimizerClass = torch.optim.AdamW,
    accumulation: int = 1,
    lora: Any = None,
    device: str = "cuda",
    cluster: Cluster | None = None,
    master_dtype: torch.dtype | None = None,
    mesh: tuple[int, int] | None = None,
    rank: int = 0,
    sequence_parallel: int = 1,
    chunked_head: bool = False,
    tile: int | None = None,
    images: int = 0,
    image_size: int | None = None,
) -> Plan:
    """Tells what a training step of a Hugging Face model will hold on each rank, before anything is
    loaded or bought. While it works, a line on the terminal says what is tried.

    The step itself runs: `shard`, the model's forward with `labels=` and without a cache, backward,
    and the optimizer, on the meta device, where tensors have shapes and no values. So no weights
    are read, and no GPU is needed. One process does it, and makes no collective;
    `torch.manual_seed` and the model at hand are left alone. (Hooks of a model at hand run, in a
    copy, and are given tensors without values.)

    Args:
        model_or_directory: A model that is not sharded yet, or a directory with a config.json. A
            model at hand is planned for as it is: frozen parameters stay frozen, adapters stay.
        ranks: The number of ranks that train together.
        batch: Sequences in a rank's micro-batch.
        sequence: Tokens in a sequence.
        policy: As `shard` takes it. With `offload`, `offload_optimizer` is thought to be used as
            well.
        memory: The bytes that a rank has, a number or text such as `"24GiB"`. `"80GB"` is a card's
            name, and means what such a card offers: so are 16, 24, 32, 40, 48, 96, 141 and 192 GB.
            `"80G"` and `"80 gb"` are the same. Other GB are 10^9 bytes. None: what fits is not
            asked.
        checkpointing: Each block keeps its inputs alone and computes again in backward, without
            reentrance.
        optimizer: A function that makes the optimizer from a list of parameters, such as a class.
        accumulation: Micro-batches in a step.
        lora: The rank of adapters, which stand where peft puts them by default, or in all linear
            maps if it has no default for the model. Or a `peft.LoraConfig`. None: no adapters.
            Without `master_dtype` they are float32, as peft makes them.
        device: `"cuda"` plans for NCCL, and rounds as CUDA's allocator does. `"cpu"` plans for gloo
            between processes of one host.
        cluster: The machines, as a `Cluster`, for the time of a step.
        master_dtype: The dtype of the model's parameters, adapters included. None: as the model has
            it, or config.json says.
        mesh: `(replicas, shards)`: chunks are cut over `shards` ranks, and repeated `replicas`
            times. Their product is `ranks`. None: chunks are cut over all ranks.
        rank: The rank to plan for. On NCCL all ranks hold the same. On gloo each holds the
            gradients of other parameters for a moment.
        sequence_parallel: Each so many ranks hold parts of the same sequences (`split_sequence`),
            so that a rank has a part of the activations. The head is then computed by chunks.
        chunked_head: The loss is that of `causal_lm_loss`, without logits.
        tile: Each block's inner maps compute so many tokens at a time (`tile`).
        images: Pictures in a rank's micro-batch, of a model that takes some. The tokens that stand
            for them are a part of the sequences. 0: text alone.
        image_size: The side of each picture, a square, in pixels. None: what the model's
            configuration says, or 1024 where it takes any.

    Returns:
        A `Plan`.

    Raises:
        FileNotFoundError: The directory has no config.json.
        ValueError: An argument is out of range, nothing trains, or the model is sharded or no model
            of transformers, or returns no loss; or transformers makes none from that config.json;
            or the optimizer can't step without values.
        TypeError: An argument has the wrong type.
        RuntimeError: transformers, or peft for `lora`, is not installed; or the model's forward
            asks for values.

    Example::

        plan = zero3.plan(directory, ranks=8, memory="24GiB", sequence=4096)
        print(plan)
        model = zero3.shard(plain_model, policy=plan.policy)
    """
    if not isinstance(cluster, Cluster | None):
        raise TypeError(f"cluster must be a zero3.Cluster or None, found {type(cluster).__name__}")
    room = None if memory is None else parse_bytes(memory, "memory")
    source = on_paper(model_or_directory, master_dtype, sees=bool(images))
    pictures = pictures_for(source, images, image_size)
    setup = Setup(
        source=source, ranks=ranks, batch=batch,
        sequence=sequence, policy=policy,
        checkpointing=checkpointing, optimizer=optimizer, accumulation=accumulation, lora=lora,
        device=device,
        mesh=mesh, rank=rank, master_dtype=master_dtype,
        sequence_parallel=sequence_parallel, chunked_head=chunked_head, tile=tile,
        pictures=pictures,
    )  # fmt: skip
    if pictures is not None and not setup.holds(batch):
        raise ValueError(
            f"sequence={sequence} is too short for {pictures.told}: with batch={batch} they take "
            f"{pictures.length(batch)} tokens of one"
        )
    with setup.tell.until_over(), torch.inference_mode(False), torch.enable_grad():
        return _planned(setup, room, cluster, "" if memory is None else meant(memory))


def _planned(setup: Setup, memory: int | None, cluster: Cluster | None, memory_meant: str) -> Plan:
    trace = setup.trace()
    moments = trace.measure(*setup.sizes)
    peak, by_cause = peak_of(moments)
    offloaded = trace.ledger.most_elsewhere
    after_forward = trace.after_forward
    highest = max(moments, key=lambda moment: moment.peak)
    attention = {
        kernel: count // min(setup.accumulation, 2)
        for kernel, count in trace.kernels.attention.items()
    }
    seconds = None if cluster is None else setup.seconds(trace, cluster)
    towers = setup.towers(trace)
    fits = batch = sequence = advised_bytes = None
    advice: tuple[str, ...] = ()
    policy = setup.policy
    most = trace.peak(*setup.sizes)
    least, unknown = setup.unknown(peak)
    if memory is not None:
        room = setup.room(memory)
        fits = most <= room
        batch = largest_batch(trace, setup, room)
        sequence = largest_sequence(trace, setup, room)
        if fits:
            policy = roomier(setup, trace, room, most)
        else:
            with_gradients = by_cause["chunks"] * (1 + trace.trainable / trace.parameters)
            state = int(with_gradients) + by_cause["optimizer"]
            if (found := advised(setup, room, batch, state)) is not None:
                (advice, advised_setup), advised_bytes = found
                policy = advised_setup.policy
    return Plan(
        peak_bytes=peak, by_cause=by_cause, unknown=(least, unknown + most - peak),
        where=highest.name,
        memory=memory, fits=fits,
        largest_batch=batch, largest_sequence=sequence, advice=advice, advised_bytes=advised_bytes,
        policy=policy, seconds=seconds,
        attention=attention, parameters=trace.parameters, trainable=trace.trainable,
        moments=tuple(moments), setup=setup, cluster=cluster,
        after_forward=after_forward, offloaded_bytes=offloaded, memory_meant=memory_meant,
        unplanned=unplanned(setup.source, trace.unreached, images=setup.pictures is not None),
        dtypes=trace.dtypes, towers=towers,
    )  # fmt: skip
