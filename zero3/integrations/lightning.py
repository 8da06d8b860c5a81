"""Strategies for Lightning's Trainer and Fabric: as its DDPStrategy, but the model is sharded and
not wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..access import is_sharded, no_sync, states_of
from ..auto_wrap import Layers
from ..checkpoint import manifest
from ..checkpoint.full_state import full_state_dict, load_full_state_dict
from ..checkpoint.load import load_checkpoint
from ..checkpoint.save import save_checkpoint
from ..comm.plain_values import decode
from ..guards.marks import ignored_by, state_of
from ..optim.clipping import clip_held
from ..optim.grad_scaler import GradScaler
from ..optim.several import held_by
from ..policy import ShardingPolicy
from ..shard import shard
from ..towers.choosing import Optional
from .alike import all_ranks
from .handover import check_together, is_chunk
from .preparing import Sharding, computes_in_low_precision, policy_and_masters, refuse_ignored
from .versions import require

require("lightning", __name__)

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402
from lightning.fabric.utilities.types import _Stateful  # noqa: E402
from lightning.fabric.wrappers import _unwrap_objects  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BaseFinetuning,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

__all__ = ["Zero3FabricStrategy", "Zero3Strategy"]

_NAMED = "is no checkpoint of zero3, and Lightning's own hold an optimizer's state by numbers"
_ALIKE = (
    *("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "fast_dev_run", "overfit_batches"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"),
    "reload_dataloaders_every_n_epochs",
)
_REFUSED = MappingProxyType(
    {
        (StochasticWeightAveraging, WeightAveraging): (
            "would mix a copy of the whole module with this rank's chunks. Leave it out, and have "
            "each rank average its own chunks (zero3.get_trainable_chunk), as examples/ema.py does"
        ),
        (BaseFinetuning,): (
            "would unfreeze parameters that have become chunks. Leave it out: freeze parameters "
            "before fit (requires_grad_), and call module.zero_grad() and "
            "zero3.set_trainable(module, ...) between two fits, which make their optimizers anew"
        ),
        (ModelPruning,): (
            "would prune parameters that have become chunks. Leave it out, and prune the module "
            "before or after training"
        ),
        (OnExceptionCheckpoint,): (
            "would save on the rank that raised alone, and every rank has to take part. Leave it "
            "out, and take ModelCheckpoint(every_n_train_steps=...)"
        ),
    }
)


class Zero3Strategy(DDPStrategy):
    """A strategy for Lightning's `Trainer`: `fit`, `validate`, `test` and `predict` with a model
    that is sharded by zero3.

    `setup` shards the LightningModule, in place, before it calls `configure_optimizers`: so
    `self.parameters()` yields the chunks there. For groups by names call `zero3.param_groups(self,
    ...)`. Parameters are shown to modules while their forward runs; `training_step` calls modules,
    and reads no parameter itself.

    * `precision="bf16-mixed"` and `"16-mixed"` become a `ShardingPolicy` that gathers and computes
      in it, with float32 masters. If `policy` is given, or the model was sharded before, with no
      `param_dtype`, autocast does it.
    * `gradient_clip_val` and `self.clip_gradients` clip the norm of what the optimizer holds, over
      all ranks, or each value.
    * `accumulate_grad_batches` reduces every micro-batch, and adds up in the chunks.
    * Ranks compare what their trainers are told: precision, clipping, accumulation, limits.
    * Checkpoints (`ModelCheckpoint`, `trainer.save_checkpoint`) are directories of
      `zero3.save_checkpoint`; all else that Lightning keeps is their `extra`. `ckpt_path` takes one
      on any number of ranks. A file of Lightning's own gives its weights to `validate`, `test` and
      `predict`.

    Args:
        args: As for `lightning.pytorch.strategies.DDPStrategy`.
        layers: As for `zero3.shard`.
        optional: As for `zero3.shard`.
        policy: As for `zero3.shard`. None: what `precision` asks for.
        kwargs: As for `lightning.pytorch.strategies.DDPStrategy`.

    Example::

        strategy = Zero3Strategy(accelerator="cpu", process_group_backend="gloo")
    """

    model: Any

    def __init__(
        self,
        *args: Any,
        layers: Layers = None,
        optional: Optional = None,
        policy: ShardingPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sharding = Sharding(policy, layers, optional)
        self._ours = False  # whether what is being restored is a checkpoint of zero3

    def setup(self, trainer: Any) -> None:
        """As DDPStrategy, in its order; the model is sharded where that would be wrapped."""
        self.accelerator.setup(trainer)
        with all_ranks(self.root_device, "what Lightning's Trainer is told") as lines:
            _refuse(trainer.callbacks)
            lines += _told(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.precision_plugin.convert_module(self.model)
        self.precision_plugin.clip_grad_by_norm = self._clip_norm
        _prepare(self.model, self.precision_plugin, self._sharding, self.root_device)
        if fitting:
            self.setup_optimizers(trainer)
            advice = "make it in configure_optimizers, from self.parameters()"
            _check([self.model], self.optimizers, self.root_device, advice)
        self.setup_precision_plugin()

    def _clip_norm(self, optimizer: Any, clip_val: float) -> None:
        clip_held(self.model, held_by(optimizer), float(clip_val))

    def teardown(self) -> None:
        """Nothing is moved: the model stays sharded, where it is."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._ours

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` has every rank write what it holds."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing, likewise."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        _refuse(self.lightning_module.trainer.callbacks)  # one saves when it is refused
        apart = ("state_dict", "optimizer_states")
        rest = {key: value for key, value in checkpoint.items() if key not in apart}
        optimizers = _inner(self.optimizers) if "optimizer_states" in checkpoint else None
        save_checkpoint(filepath, self.lightning_module, optimizers or None, extra=rest)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._ours = _is_ours(checkpoint_path)
        if not self._ours:
            found: dict[str, Any] = super().load_checkpoint(
                checkpoint_path, weights_only=weights_only
            )
            if self.optimizers:
                raise ValueError(
                    f"{checkpoint_path} {_NAMED}. To begin from its weights, load them into the "
                    "module before fit"
                )
            return found
        extra = load_checkpoint(
            checkpoint_path, self.lightning_module, _inner(self.optimizers) or None
        )
        return {**extra, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if not self._ours:
            load_full_state_dict(self.lightning_module, checkpoint["state_dict"], strict=strict)


class Zero3FabricStrategy(FabricDDPStrategy):
    """A strategy for Lightning's `Fabric`.

    First the model is set up, then the optimizer is made from its chunks and set up, as with FSDP.
    `fabric.save` and `fabric.load` take the model, its optimizers, and whatever else is plain or
    has a `state_dict`; what they write is a directory of `zero3.save_checkpoint`, for any number of
    ranks.

    Args:
        args: As for `lightning.fabric.strategies.DDPStrategy`.
        layers: As for `zero3.shard`.
        optional: As for `zero3.shard`.
        policy: As for `zero3.shard`. None: what Fabric's `precision` asks for.
        kwargs: As for `lightning.fabric.strategies.DDPStrategy`.

    Example::

        strategy = Zero3FabricStrategy(process_group_backend="gloo")
    """

    def __init__(
        self,
        *args: Any,
        layers: Layers = None,
        optional: Optional = None,
        policy: ShardingPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sharding = Sharding(policy, layers, optional)
        # in the same order on all ranks
        self._models: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._backward_sync_control = _NoSync()

    def module_to_device(self, module: nn.Module) -> None:
        """`shard` does that."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        _prepare(module, self.precision, self._sharding, self.root_device)
        self._models[module] = None
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        advice = "call fabric.setup_module first, and make it from model.parameters()"
        _check(self._models, [optimizer], self.root_device, advice)
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], *more: Any
    ) -> tuple[nn.Module, list[Optimizer], *tuple[Any, ...]]:
        raise ValueError(
            "sharding replaces the parameters that these optimizers hold: call model = "
            "fabric.setup_module(model), make the optimizer from "
            "zero3.get_trainable_chunk(model), and call optimizer = "
            "fabric.setup_optimizers(optimizer)"
        )

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        held = held_by(optimizer)
        of = {state_of(parameter) or ignored_by(parameter) for parameter in held}
        models = [model for model in self._models if of.intersection(states_of(model))]
        model = models[0] if len(models) == 1 else nn.ModuleList(models or [module])
        return clip_held(model, held, float(max_norm), float(norm_type), error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state_dict(module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        load_full_state_dict(module, state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        model, optimizers, rest = _divided(state)
        if filter:
            raise ValueError(
                "checkpoints of zero3 hold all of a model: fabric.save with filter= is not "
                "supported"
            )
        rest = {
            key: value.state_dict() if isinstance(value, _Stateful) else value
            for key, value in rest.items()
        }
        save_checkpoint(path, model, optimizers or None, extra=rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        with all_ranks(self.root_device, "fabric.load"):
            model, optimizers, rest = _divided(
                state if isinstance(state, dict) else {"model": state}
            )
            _look(path, rest if strict else ())
        extra: dict[str, Any] = load_checkpoint(path, model, optimizers or None)
        for key in [key for key in rest if key in extra]:
            value = extra.pop(key)
            if isinstance(rest[key], _Stateful):
                rest[key].load_state_dict(value)
            else:
                state[key] = value
        return extra


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return no_sync(module) if enabled else nullcontext()


def _divided(state: dict[str, Any]) -> tuple[nn.Module, dict[str, Optimizer], dict[str, Any]]:
    found: dict[str, Any] = _unwrap_objects(state)
    models = [value for value in found.values() if isinstance(value, nn.Module)]
    if len(models) != 1:
        raise ValueError(
            f"a checkpoint of zero3 holds one model, and here are {len(models)}: save each in a "
            "directory of its own"
        )
    optimizers = {key: value for key, value in found.items() if isinstance(value, Optimizer)}
    rest = {k: v for k, v in found.items() if not isinstance(v, nn.Module | Optimizer)}
    return models[0], optimizers, rest


def _inner(optimizers: Any) -> list[Optimizer]:
    """Without what Lightning puts around them."""
    return [getattr(optimizer, "_optimizer", optimizer) for optimizer in optimizers]


def _is_ours(path: Any) -> bool:
    return (Path(path) / manifest.NAME).is_file()


def _look(path: Any, keys: Iterable[str]) -> None:
    """That a checkpoint of ours holds these beside the model: before anything is filled."""
    if not _is_ours(path):
        raise ValueError(f"{path} {_NAMED}: fabric.load_raw loads its weights")
    found = manifest.parse(Path(path) / manifest.NAME)["extra"]
    extra = decode(found, lambda number: None)
    if missing := [key for key in keys if key not in extra]:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; beside the model it has "
            f"{', '.join(extra) or 'nothing'}. Nothing was loaded. Leave them out, or pass "
            "strict=False"
        )


def _check(models: Iterable[nn.Module], optimizers: Any, device: torch.device, advice: str) -> None:
    """That they step chunks, and may: an optimizer that was made before would step parameters that
    are gone.
    """
    models = list(models)
    for model in models:
        refuse_ignored(model)
    with all_ranks(device, "what the optimizers hold"):
        for optimizer in _inner(optimizers):
            held = held_by(optimizer)
            if not all(is_chunk(each) or ignored_by(each) is not None for each in held):
                raise ValueError(
                    f"{type(optimizer).__name__} holds parameters that are no chunks of a sharded "
                    f"model: {advice}, zero3.get_trainable_chunk or zero3.param_groups"
                )
    for model in models:
        check_together(model, _inner(optimizers))


def _refuse(callbacks: Any) -> None:
    for callback in callbacks:
        for kinds, why in _REFUSED.items():
            if isinstance(callback, kinds):
                raise ValueError(f"{type(callback).__name__} {why}")


def _told(trainer: Any) -> list[str]:
    """What ranks have to be told alike, or they would train with other numbers, or wait."""
    schedules = (getattr(callback, "scheduling", None) for callback in trainer.callbacks)
    return [
        f"trainer.{trainer.state.fn.value}()",
        *(f"{name}={getattr(trainer, name, None)!r}" for name in _ALIKE),
        *(f"accumulate_grad_batches={each!r}" for each in schedules if each is not None),
    ]


def _prepare(model: nn.Module, plugin: Any, sharding: Sharding, device: torch.device) -> None:
    """Shards the model, unless it is. Mixed precision is its policy's, or else autocast's."""
    mixed = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(plugin.precision, "no")
    if not is_sharded(model):
        policy = policy_and_masters(model, sharding.policy, mixed)
        shard(model, sharding.layers, optional=sharding.optional, device=device, policy=policy)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, GradScaler):
        plugin.scaler = GradScaler(device.type, enabled=scaler.is_enabled())
        plugin.scaler.load_state_dict(scaler.state_dict())  # its options, too
    if mixed != "no" and computes_in_low_precision(model):
        plugin.forward_context = nullcontext
