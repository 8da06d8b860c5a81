"""Zero3Accelerator: accelerate's Accelerator, whose models are sharded by zero3 and not wrapped in
DistributedDataParallel.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..access import get_trainable_chunk, is_sharded, no_sync
from ..auto_wrap import Layers
from ..checkpoint.full_state import full_state_dict
from ..checkpoint.load import load_checkpoint
from ..checkpoint.save import save_checkpoint
from ..comm.agreement import agree
from ..huggingface.save_pretrained import save_pretrained
from ..optim.clipping import clip_grad_norm_
from ..optim.grad_scaler import GradScaler
from ..optim.several import held_by
from ..sequences.parts import parts_of
from ..towers.choosing import Optional
from .alike import all_ranks, check_alike, everyone
from .handover import Handover, check_held, check_together, is_chunk
from .preparing import Policy, Sharding, computes_in_low_precision, refuse_ignored
from .versions import require

require("accelerate", __name__)

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DistributedType, recursively_apply  # noqa: E402
from accelerate.utils.constants import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME  # noqa: E402

__all__ = ["Zero3Accelerator"]

_DIRECTORY = "zero3"  # in what save_state writes
_OTHERS = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)
_ALIKE = (  # options that decide which collectives a loop makes, and over which rows
    "gradient_accumulation_steps",
    "mixed_precision",
    "even_batches",
    "split_batches",
    "dispatch_batches",
    "use_seedable_sampler",
    "step_scheduler_with_optimizer",
)


class Zero3Accelerator(Accelerator):
    """An `accelerate.Accelerator` that shards the models that it prepares.

    `prepare` shards each model that is not sharded yet, in place, and gives its optimizer the
    chunks, by the options of its groups. Pass both to one call. Everything else of accelerate is
    used as always: `backward`, `clip_grad_norm_`, `accumulate`, `save_state`, `load_state`,
    `gather_for_metrics`, `unwrap_model`, `get_state_dict`.

    * `accumulate` reduces the gradients of every micro-batch, which then add up in the chunks. So
      no rank holds a whole gradient. With `sync_each_batch=False`, or inside
      `accelerator.no_sync(model)`, they are kept whole and reduced once.
    * `mixed_precision="bf16"` or `"fp16"` becomes a `ShardingPolicy` that gathers and computes in
      it, with float32 masters. If `policy` is given, or a model was sharded with one that has no
      `param_dtype`, autocast does it.
    * `save_state` writes models and optimizers as `zero3.save_checkpoint`, so `load_state` works on
      any number of ranks.
    * `get_state_dict` returns the whole state on rank 0, and `{}` on the other ranks, which all
      call it.

    Args:
        args: As for `accelerate.Accelerator`.
        policy: As for `zero3.shard`, but parameters that its `ignored` leaves alone have to be
            frozen. None: what `mixed_precision` asks for.
        layers: As for `zero3.shard`.
        optional: As for `zero3.shard`.
        sync_each_batch: Whether `accumulate` reduces the gradients of every micro-batch.
        sequence_parallel: Each so many ranks, one after another, hold parts of the same sequences:
            prepared loaders give them the same batches, for `zero3.split_sequence`.
        kwargs: As for `accelerate.Accelerator`.

    Raises:
        ValueError: `mixed_precision` or the kind of distribution (FSDP, DeepSpeed, Megatron-LM)
            can't be had together with zero3; or `parallelism_config` divides sequences in other
            ways.

    Example::

        accelerator = Zero3Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(directory)
    """

    scaler: Any
    native_amp: bool
    _optimizers: list[Any]
    _step_loaded: int

    def __init__(
        self,
        *args: Any,
        policy: Policy = None,
        layers: Layers = None,
        optional: Optional = None,
        sync_each_batch: bool = True,
        sequence_parallel: int = 1,
        **kwargs: Any,
    ) -> None:
        # accelerate leaves it out where a process has had an Accelerator before
        _check_sequences(kwargs.get("parallelism_config"))
        super().__init__(*args, **kwargs)
        sharding = Sharding(policy, layers, optional, parts=sequence_parallel)
        self.shards_with(sharding, sync_each_batch=sync_each_batch)

    def shards_with(self, sharding: Sharding, *, sync_each_batch: bool) -> None:
        """What a constructor adds to accelerate's: for an Accelerator that another library has
        made, and whose class was changed.
        """
        _check(self.distributed_type, self.mixed_precision, self.device)
        _check_sequences(getattr(self, "parallelism_config", None))
        self._sharding, self._saves_apart = sharding, False
        self._deals = self._one_of_each_group = False
        self.gradient_state.plugin_kwargs["sync_each_batch"] = sync_each_batch
        if self.scaler is not None:
            self.scaler = GradScaler(
                self.device.type,
                **(self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}),
            )
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    # -- models and optimizers

    def shard(self, model: nn.Module) -> None:
        """Shards a model that is not sharded yet, as `prepare` does."""
        if not is_sharded(model) and any(True for _ in model.parameters()):
            self._sharding.shard(model, self.device, self.mixed_precision)
        parts = parts_of(model)
        if (1 if parts is None else parts.size) != self._sharding.parts and is_sharded(model):
            raise ValueError(
                f"sequence_parallel={self._sharding.parts}, and the model was sharded so that "
                f"{'no' if parts is None else parts.size} ranks share sequences: give zero3.shard "
                'a mesh ("dp_shard", "sp") of that size'
            )
        refuse_ignored(model)

    # -- loaders: the ranks of a group, which share sequences, are one process to them

    @property
    def num_processes(self) -> int:
        ranks: int = super().num_processes
        return ranks // self._sharding.parts if vars(self).get("_deals") else ranks

    @property
    def process_index(self) -> int:
        index: int = super().process_index
        return index // self._sharding.parts if vars(self).get("_deals") else index

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """As accelerate's. Ranks that share sequences get the same batches."""
        if self._sharding.parts == 1:
            return super().prepare_data_loader(*args, **kwargs)
        if self.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True deals batches to each rank, and sequence_parallel to each "
                "group of ranks: leave it out"
            )
        self.dataloader_config.dispatch_batches, self._deals = False, True
        try:
            return super().prepare_data_loader(*args, **kwargs)
        finally:
            self._deals = False

    def gather(self, tensor: Any) -> Any:
        found = super().gather(tensor)
        return recursively_apply(self._firsts, found) if self._one_of_each_group else found

    def _firsts(self, gathered: Tensor) -> Tensor:
        """What the first rank of each group has given."""
        ranks = gathered.chunk(self.num_processes)
        return torch.cat(ranks[:: self._sharding.parts])

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not for sharded models, of which no rank can run a forward alone.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "accelerate's join_uneven_inputs knows DistributedDataParallel alone, and a sharded "
            "model would wait for ranks that have no data: use `with Join([zero3.joinable(model, "
            "step)]):` of torch (docs/uneven_inputs.md)"
        )

    @contextmanager
    def one_of_each_group(self, *, on: bool = True) -> Iterator[None]:
        """Inside, `gather` takes one rank's values for those of its group, which all have them."""
        before, self._one_of_each_group = self._one_of_each_group, on and self._sharding.parts > 1
        try:
            yield
        finally:
            self._one_of_each_group = before

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shards models, hands their chunks to their optimizers, and prepares everything else as
        accelerate does.

        Raises:
            ValueError: Ranks differ in the options of their accelerators, a policy leaves alone
                parameters that train (`ignored`), or an optimizer holds other parameters. Every
                rank raises it.
        """
        given = [each for each in args if isinstance(each, nn.Module)]
        if given:
            sync = self.gradient_state.plugin_kwargs.get("sync_each_batch")
            told = {name: getattr(self, name, None) for name in _ALIKE} | {"sync_each_batch": sync}
            check_alike(self.device, "the options of Zero3Accelerator", told, "prepare")
        for model in filter(is_sharded, given):
            refuse_ignored(model)
        models = [each for each in given if not is_sharded(each)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        optimizers = [o for o in optimizers if not hasattr(o, "_is_accelerate_prepared")]
        with all_ranks(self.device, "prepare") if given or optimizers else nullcontext():
            handover = Handover(models, optimizers)
        for model in models:
            self.shard(model)
        handover.finish()
        for model in filter(is_sharded, given):
            check_together(model, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Shards the model unless it is sharded already. Autocast and torch.compile are applied as
        accelerate does.
        """
        self.shard(model)
        if not is_sharded(model):  # it has no parameters
            return super().prepare_model(model, device_placement, evaluation_mode=True)
        native_amp = self.native_amp
        self.native_amp = self.native_amp and not computes_in_low_precision(model)
        try:
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        finally:
            self.native_amp = native_amp

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """As accelerate's, for an optimizer over chunks.

        Raises:
            ValueError: It holds other parameters. Every rank raises it.
        """
        with all_ranks(self.device, "prepare_optimizer"):
            check_held(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]:
        """As accelerate's, but nothing where the policy of the prepared models says in which dtype
        they compute.
        """
        low = any(computes_in_low_precision(model) for model in self._sharded())
        return nullcontext() if low else super().autocast(autocast_handler)

    # -- a step

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clips by the one norm of all models whose parameters are given. Every rank calls it.

        Raises:
            ValueError: Parameters are given that belong to no prepared model, or a part of a
                model's.
        """
        given = {
            id(each): each
            for each in ([parameters] if isinstance(parameters, Tensor) else parameters)
        }
        models = nn.ModuleList(
            model
            for model in self._sharded()
            if given.keys() & {id(chunk) for chunk in get_trainable_chunk(model)}
        )
        trained = {id(chunk) for chunk in get_trainable_chunk(models)} if models else set()
        strangers = [
            each for each in given.values() if id(each) not in trained and each.grad is not None
        ]
        if not trained or strangers or trained - given.keys():
            raise ValueError(
                f"clip_grad_norm_ got {len(given)} parameters. It takes all of a prepared model "
                "(model.parameters()): the norm is one number over all ranks, and a rank does "
                "not know which slices of the others belong to a part of a model"
            )
        self.unscale_gradients()
        return clip_grad_norm_(models, max_norm, norm_type)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backwards keep whole gradients, and do not reduce them: see `zero3.no_sync`."""
        return no_sync(model) if is_sharded(model) else super().no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """As accelerate's, for a model that is not sharded.

        Raises:
            RuntimeError: The model is sharded.
        """
        if is_sharded(model):
            raise RuntimeError(
                "accelerate's trigger_sync_in_backward knows DistributedDataParallel alone: call "
                "zero3.reduce_gradients(model) after the last backward, outside of no_sync"
            )
        return Accelerator.trigger_sync_in_backward(model)  # type: ignore[no-any-return]

    def wait_for_everyone(self) -> None:
        """As accelerate's.

        Raises:
            ValueError: Other ranks save or load, which takes all of them. Every rank raises it.
        """
        agree(everyone(self.device), "wait_for_everyone", [])
        super().wait_for_everyone()

    # -- states

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict on rank 0, on the CPU, and `{}` on other ranks. Every rank
        calls it.
        """
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)
        return {} if self._saves_apart else full_state_dict(self.unwrap_model(model))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes safetensors files as `zero3.save_pretrained` does. Every rank calls it; nothing is
        gathered.
        """
        if not is_sharded(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
        else:
            save_pretrained(self.unwrap_model(model), save_directory, max_shard_size=max_shard_size)

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Any:
        """As accelerate's. Sharded models and their optimizers are in one `zero3.save_checkpoint`,
        in the directory `zero3` of it.
        """
        with self._apart():
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> None:
        """As accelerate's, on any number of ranks.

        Raises:
            ValueError: A file is missing, damaged or of something else. Every rank raises it,
                before anything has changed.
        """
        with self._apart():
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
            # accelerate keeps it beside the random states, which a new rank has none of
            self.step = self._step_loaded

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, hooks write and read the states of sharded models, and accelerate sees none."""
        every, self._saves_apart, self._step_loaded = self._optimizers, True, self.step
        self._apart_optimizers = [optimizer for optimizer in every if _holds_chunks(optimizer)]
        self._optimizers = [optimizer for optimizer in every if not _holds_chunks(optimizer)]
        try:
            yield
        finally:
            self._optimizers, self._saves_apart = every, False

    def _save_sharded(
        self, models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str
    ) -> None:
        weights[:] = [
            state for model, state in zip(models, weights, strict=True) if not is_sharded(model)
        ]
        if (model := self._together()) is not None:
            path, extra = Path(output_dir) / _DIRECTORY, {"step": self.step}
            save_checkpoint(path, model, self._plain_optimizers(), extra=extra)

    def _load_sharded(self, models: list[nn.Module], input_dir: str) -> None:
        models[:] = [model for model in models if not is_sharded(model)]
        if (model := self._together()) is not None:
            self._check_files(Path(input_dir))
            path = Path(input_dir) / _DIRECTORY
            self._step_loaded = load_checkpoint(path, model, self._plain_optimizers())["step"]

    def _check_files(self, directory: Path) -> None:
        """accelerate would miss them when the models have changed."""
        # rank 0 may have written them just now
        agree(everyone(self.device), "load_state", [])
        kinds = (SCHEDULER_NAME, self._schedulers), (OPTIMIZER_NAME, self._optimizers)
        needed = [
            f"{kind}{f'_{number}' if number else ''}.bin"
            for kind, each in kinds
            for number in range(len(each))
        ]
        needed += [f"custom_checkpoint_{number}.pkl" for number in range(len(self._custom_objects))]
        needed += [SCALER_NAME] if self.scaler is not None else []
        with all_ranks(self.device, "load_state"):
            if missing := [name for name in needed if not (directory / name).is_file()]:
                raise ValueError(
                    f"{directory} has no {', '.join(missing)}; nothing was loaded. Prepare what "
                    "was prepared when it was saved, or load it from where save_state wrote it"
                )

    def _plain_optimizers(self) -> list[torch.optim.Optimizer] | None:
        return [optimizer.optimizer for optimizer in self._apart_optimizers] or None

    def _sharded(self) -> list[nn.Module]:
        models = filter(is_sharded, self._models)
        return [self.unwrap_model(model, keep_torch_compile=False) for model in models]

    def _together(self) -> nn.Module | None:
        """The one sharded model, or all in one module: then one checkpoint holds them all, and
        appears at once.
        """
        models = self._sharded()
        return models[0] if len(models) == 1 else nn.ModuleList(models) if models else None


def _holds_chunks(optimizer: Any) -> bool:
    return any(map(is_chunk, held_by(optimizer)))


def _check_sequences(config: Any) -> None:
    for name in ("sp_size", "cp_size"):
        if (getattr(config, name, None) or 1) > 1:
            raise ValueError(
                f"parallelism_config with {name}={getattr(config, name)}: it exchanges in another "
                "way, which does not know of sharded models. Use sequence_parallel="
                f"{getattr(config, name)}"
            )


def _check(kind: Any, mixed_precision: str, device: torch.device) -> None:
    if kind in _OTHERS:
        raise ValueError(
            f"zero3 shards the model itself, and can't do it under {kind}: switch that off "
            "(accelerate config, ACCELERATE_USE_*)"
        )
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ValueError(
            f"mixed_precision={mixed_precision!r}: zero3 computes in bf16 or fp16, or as the "
            "model is stored ('no')"
        )
    if mixed_precision == "fp16" and device.type == "cpu":
        raise ValueError(
            f"fp16 on the device {device}: it is for GPUs, and its gradients would be wrong here. "
            "Use bf16, or no mixed precision"
        )
