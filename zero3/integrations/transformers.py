"""Zero3Mixin and Zero3Trainer: transformers' Trainer, and TRL's trainers, over models that zero3
shards.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..access import is_sharded, resident
from ..auto_wrap import Layers
from ..checkpoint.meta_buffers import twin
from ..comm.agreement import agree
from ..comm.board import board_for
from ..comm.factory import communicator_for
from ..core.sites import become
from ..guards.module_overrides import Override
from ..huggingface.save_pretrained import save_pretrained
from ..names import named_tensors
from ..offload.activations import offload_activations
from ..offload.optimizer import offload_optimizer
from ..optim.check_optimizer import check_optimizer
from ..resilience.batch_finder import BatchFinder
from ..sequences.causal_lm import OtherLogitsError, causal_lm_loss, is_by_chunks
from ..sequences.chunks import mean_of
from ..sequences.parts import parts_of
from ..sequences.splitting import split_sequence
from ..towers.choosing import Optional
from . import trainer_checkpoints as checkpoints
from . import trainer_optimizers as optimizers
from .alike import all_ranks, check_alike, everyone
from .engines import VLLMWeights, keep_masters
from .handover import Handover
from .preparing import Policy, Sharding, enclose_forward
from .versions import require

require("transformers", __name__)
require("accelerate", __name__)

from transformers import Trainer  # noqa: E402
from transformers.trainer import TRAINING_ARGS_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

from .accelerate import Zero3Accelerator  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

__all__ = ["Zero3Mixin", "Zero3Trainer"]

_log = logging.getLogger("zero3")
_KEPT_KINDS = (ValueError, TypeError, RuntimeError, OSError)  # of errors that keep their type
_SHARDS_ITSELF = "zero3 shards the model itself. Leave it out"
_CONVERTS = (
    "it would convert the float32 masters of a sharded model. bf16=True or fp16=True "
    "evaluates in low precision without it"
)
_REFUSED = MappingProxyType(
    {  # options of transformers and TRL, with reasons
        "fsdp": _SHARDS_ITSELF,
        "deepspeed": _SHARDS_ITSELF,
        "parallelism_config": (
            "it divides the ranks for other ways to shard a model, and zero3 divides the "
            "model among all. Leave it out; parts of sequences: sequence_parallel="
        ),
        "bf16_full_eval": _CONVERTS,
        "fp16_full_eval": _CONVERTS,
        "use_liger_kernel": (
            "it gives modules other forwards when training begins, and those would not fetch "
            "the weights. Leave it out"
        ),
        "enable_jit_checkpoint": (
            "each rank would save when its own signal comes, and all ranks have to save "
            "together. Set save_steps"
        ),
        "save_on_each_node": (
            "all ranks write one checkpoint together, on a file system that all of them see. "
            "Leave it out"
        ),
    }
)
_OF_ONE_RANK = (  # beginnings of the names of arguments that a rank may have for itself
    *("output_dir", "logging_dir", "resume_from_checkpoint", "model_init_kwargs", "chat_template"),
    *("hub_", "push_to_hub", "trackio_", "run_name", "report_to", "project", "log_", "debug"),
    *("disable_tqdm", "skip_memory_metrics", "num_completions_to_print", "do_", "local_rank"),
    *("dataset_num_proc", "dataloader_num_workers", "dataloader_p", "dataloader_multi"),
    *("ddp_timeout", "tf32", "torch_empty_cache_steps", "vllm_g", "vllm_server"),
)


class Zero3Mixin(_Base):
    """Put it before a trainer class of transformers or TRL: `class MySFT(Zero3Mixin, SFTTrainer):
    ...`.

    The trainer shards the model that it is given, unless that is sharded already, and a reference
    model likewise. It then gives what the same trainer gives under DistributedDataParallel: losses,
    logged norms, groups of weight decay, evaluation, prediction, the best model, checkpoints. What
    differs:

    * `bf16=True` and `fp16=True` become a `ShardingPolicy` that gathers and computes in that dtype,
      with float32 masters. So norms and softmax compute in it too, where autocast would take
      float32. Another `policy` decides by itself.
    * A checkpoint holds the weights once, as Hugging Face files, and beside them `zero3/` with the
      optimizer's state. It can be resumed on any number of ranks. `resume_from_checkpoint=True`
      passes over checkpoints that are not whole.
    * `activation_offloading` of TRL is `zero3.offload_activations`, which leaves the weights where
      they are.
    * Gradient accumulation reduces the gradients of every micro-batch, so that no rank holds whole
      ones. `accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": False}}` keeps
      them whole, and reduces once.
    * `auto_find_batch_size=True` cuts each batch into micro-batches that fit on all ranks
      (`zero3.BatchFinder`). The global batch, the number of steps and what is logged stay.
    * Where the loss is a causal model's own, it is made without logits, by `zero3.causal_lm_loss`.
      Evaluation, which may ask for logits, has them. (TRL's SFTTrainer does without them itself.)
    * Every rank calls `train`, `evaluate`, `predict`, `save_model` and the model's `generate`.
      Inside `generate` each rank holds the whole model, and stops when it likes.

    Args:
        args: As for the trainer class.
        policy: As for `zero3.shard`, but not with `stage=1`, and what its `ignored` leaves alone
            has to be frozen. None: what `bf16` or `fp16` of the training arguments ask for.
        layers: As for `zero3.shard`.
        optional: As for `zero3.shard`.
        sequence_parallel: Each so many ranks, one after another, hold parts of the same sequences
            (`zero3.split_sequence`), so that each has a part of the activations. They get the same
            batches, and what is logged is what one process for each group logs. Of TRL's trainers
            SFTTrainer takes it.
        chunked_head: Whether training makes a causal model's loss without logits.
        kwargs: As for the trainer class.

    Raises:
        ValueError: An unsharded model has no values; or the arguments ask for what can't be had:
            fp16 on the CPU, an optimizer that divides the model itself, and others, which
            docs/integrations.md lists. It names the option.

    Example::

        class Trainer(Zero3Mixin, transformers.Trainer):
            pass

        trainer = Trainer(model=model, args=arguments, train_dataset=examples)
        trainer.train()
        trainer.save_model()
    """

    optimizer: Any
    current_gradient_accumulation_steps: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kinds = cls.__mro__[: cls.__mro__.index(Zero3Mixin)]
        if before := [kind for kind in kinds if not issubclass(kind, Zero3Mixin)]:
            raise TypeError(
                f"class {cls.__name__}: {before[0].__name__} stands before Zero3Mixin, which "
                "would change nothing. Put it first"
            )

    def __init__(
        self,
        *args: Any,
        policy: Policy = None,
        layers: Layers = None,
        optional: Optional = None,
        sequence_parallel: int = 1,
        chunked_head: bool = True,
        **kwargs: Any,
    ) -> None:
        if self._is_of_trl():
            require("trl", "Zero3Mixin before a trainer of TRL")
        self._zero3_choice = policy, layers, optional
        self._offloads_activations = self._finds_batches = False
        self._zero3_finder: BatchFinder | None = None
        self._chunks_head, self._sequence_parallel = chunked_head, sequence_parallel
        try:
            super().__init__(*args, **kwargs)
        finally:
            if self._offloads_activations:
                self.args.activation_offloading = True  # of TRL
        if self._sequence_parallel != 1:
            self._check_parts()
        self._shard_models()
        if self._finds_batches and is_sharded(self.model):
            self._finder_of(self.model)
        keep_masters(self.model)
        if (engine := getattr(self, "vllm_generation", None)) is not None:
            VLLMWeights(engine, self._sharded_models, self._plain_optimizer)
        elif getattr(self.args, "use_vllm", False) or hasattr(self, "vllm_client"):
            raise ValueError(
                f"use_vllm=True: {type(self).__name__} sends weights to vLLM in a way of its own, "
                "and would send chunks. Leave it out, or take a trainer that has `vllm_generation`"
            )
        if self._offloads_activations:
            self.maybe_activation_offload_context = offload_activations()

    # -- sharding

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        with all_ranks(self.args.device, "the arguments of the trainer"):
            for option, reason in _REFUSED.items():
                if value := getattr(self.args, option, None):
                    raise ValueError(f"{option}={value!r}: {reason}")
        if self.args.auto_find_batch_size:  # the Trainer's own begins anew, on one rank alone
            if self._is_of_trl() and not self._takes_single_rows():
                raise ValueError(
                    "auto_find_batch_size=True: rows of this trainer's batches belong together. "
                    "Set per_device_train_batch_size"
                )
            self._finds_batches, self.args.auto_find_batch_size = True, False
        # TRL's own, which would take the layers' full buffers along
        if getattr(self.args, "activation_offloading", False):
            self._offloads_activations, self.args.activation_offloading = True, False
        accumulation = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        # the Trainer makes one of a class that it names itself
        become(self.accelerator, Zero3Accelerator)
        self.accelerator.shards_with(
            Sharding(
                *self._zero3_choice, head_in_root=self._is_of_trl(), parts=self._sequence_parallel
            ),
            sync_each_batch=accumulation.get("sync_each_batch", True),
        )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model: nn.Module = super().call_model_init(trial)
        self._shard(model)
        return model

    def _is_of_trl(self) -> bool:
        return "trl" in map(_library_of, type(self).__mro__)

    def _takes_single_rows(self) -> bool:
        """Whether each row of a batch counts by itself, of all trainers of TRL."""
        return any(kind.__name__ == "SFTTrainer" for kind in type(self).__mro__)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: `shard` moves one layer after another, so the whole model need not fit on the
        device.
        """

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._shard_models()  # TRL's constructors already compute here
        return super()._precompute_ref_logps(*args, **kwargs)

    def _shard_models(self) -> None:
        """When the constructor is through with them: TRL's adds adapters, and other forwards."""
        for model in self._sharded_models():
            self._shard(model)

    def _sharded_models(self) -> list[nn.Module]:
        reference = getattr(self, "ref_model", None)
        return [self.model, *([reference] if isinstance(reference, nn.Module) else [])]

    def _shard(self, model: nn.Module) -> None:
        is_trained = model is getattr(self, "model", None)
        optimizer = getattr(self, "optimizer", None) if is_trained else None
        with all_ranks(self.args.device, "the optimizers of the trainer"):
            models = [] if is_sharded(model) else [model]
            handover = Handover(models, [] if optimizer is None else [optimizer])
        self.accelerator.shard(model)
        handover.finish()
        if self._is_of_trl():
            enclose_forward(model)
        if is_trained:
            self._zero3_numel = (
                _numel_but_for_embeddings(model) if hasattr(model, "num_parameters") else 0
            )
        known = vars(model).get("generate")  # what `shard` has put there, or this has
        ours = isinstance(known, Override) and known.runs(_generate)
        if hasattr(model, "generate") and not ours:
            Override(model, "generate", _generate)

    # -- training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's. If a rank raises an exception, all do, and each error names that
        rank.

        Raises:
            ValueError: Ranks differ in their arguments, in the number of their steps, or in the
                checkpoints that they see. Every rank raises it.
        """
        with _ends_together(self):
            self._check_arguments(resume_from_checkpoint)
            if resume_from_checkpoint is True:
                resume_from_checkpoint = self._newest_whole_checkpoint()
            elif resume_from_checkpoint:
                self._check(Path(resume_from_checkpoint))
                values = {"resume_from_checkpoint": checkpoints.step_of(resume_from_checkpoint)}
                what = "the step that they go on from"
                check_alike(self.args.device, what, values, "train")
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _check_arguments(self, resume: Any) -> None:
        # rows are drawn by `data_seed`, if there is one
        own = (*_OF_ONE_RANK, *(["seed"] if self.args.data_seed is not None else []))
        # a class of the user's may hold anything, such as directories of a host
        kinds = type(self.args).__mro__
        theirs = next(kind for kind in kinds if _library_of(kind) in ("transformers", "trl"))
        known = {field.name for field in fields(theirs)}
        told = self.args.to_dict().items()
        values = {k: value for k, value in told if k in known and not k.startswith(own)}
        if isinstance(resume, str | os.PathLike):  # on a disk of each host's it may be another
            resume = "a path"
        values["train(resume_from_checkpoint)"] = resume or None
        check_alike(self.args.device, "the arguments of training", values, "train")

    def set_initial_training_values(self, args: Any, *rest: Any) -> Any:
        """As the trainer's. Ranks compare the numbers of their steps."""
        found = super().set_initial_training_values(args, *rest)
        values = {"steps": found[-1]}
        cadences = args.logging_strategy, args.save_strategy, args.eval_strategy
        if args.gradient_accumulation_steps > 1 or "epoch" in cadences:
            values["batches of an epoch"] = found[-2]
        remedy = "Give every rank the same rows: the trainer deals them out"
        check_alike(args.device, "how long they train", values, "train", remedy)
        return found

    def _finder_of(self, model: nn.Module) -> BatchFinder:
        if self._zero3_finder is None or self._zero3_finder.model is not model:
            try:
                self._zero3_finder = BatchFinder(model)
            except ValueError as error:
                raise ValueError(f"auto_find_batch_size=True: {error}") from error
        return self._zero3_finder

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """The trainer's, once for each micro-batch that fits."""
        if not self._finds_batches:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        steps, losses = self.current_gradient_accumulation_steps, []
        for micro in self._finder_of(model).micro_batches(inputs):
            # a loss by the number of items in the batch is a part of the batch's; a mean is not
            share = 1.0 if self._divides_by_items(num_items_in_batch) else micro.weight
            self.current_gradient_accumulation_steps = steps / share
            try:
                with micro:
                    loss = super().training_step(model, micro.data, num_items_in_batch)
            finally:
                self.current_gradient_accumulation_steps = steps
            losses += [] if micro.failed else [loss]
        return torch.stack(losses).sum()

    def _divides_by_items(self, num_items_in_batch: Any) -> bool:
        """As the trainer's `training_step` decides it."""
        if (said := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            return bool(said)
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return by_model or self.compute_loss_func is not None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As the trainer's. It makes no logits if the loss is a causal model's own."""
        if self._sequence_parallel != 1:
            return self._loss_of_parts(model, inputs, return_outputs, num_items_in_batch)
        own = self._next_with("compute_loss") is not Trainer or self.label_smoother is not None
        own = own or self.compute_loss_func is not None or return_outputs or not self._chunks_head
        if not own and is_by_chunks(model, inputs):
            compute: Any = partial(_without_logits, model)
            try:
                return super().compute_loss(compute, inputs, num_items_in_batch=num_items_in_batch)
            except OtherLogitsError as error:
                _log.info("chunked_head=True does nothing for this model: %s", error)
                self._chunks_head = False
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _check_parts(self) -> None:
        of_trl = next((kind for kind in type(self).__mro__ if _library_of(kind) == "trl"), None)
        reason = None
        if of_trl is not None and of_trl.__name__ != "SFTTrainer":
            reason = f"{of_trl.__name__} needs whole sequences"
        elif self.args.label_smoothing_factor:
            reason = "label_smoothing_factor needs whole logits"
        elif getattr(self, "aux_loss_enabled", False):
            reason = "a router's loss (router_aux_loss_coef) needs whole sequences"
        elif self.compute_loss_func is not None:
            reason = "compute_loss_func does not know that it gets a part"
        elif getattr(self.args, "include_num_input_tokens_seen", "no") not in ("no", False):
            reason = "include_num_input_tokens_seen counts each group's tokens several times"
        if reason is not None:
            raise ValueError(f"sequence_parallel={self._sequence_parallel}: {reason}. Leave it out")

    def _loss_of_parts(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, items: Any
    ) -> Any:
        """The mean over ranks is what one process for each group would give. `items`: in it, each
        rank of a group counts the same tokens.
        """
        part = split_sequence(model, inputs)
        scales = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        if items is None:  # the mean over groups of each one's mean
            labels = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, 1:]
            items = (labels != -100).sum() * scales
        items = torch.as_tensor(items) / self._sequence_parallel
        if self._next_with("compute_loss") is not Trainer:  # TRL's, which divides by them
            return super().compute_loss(model, part, return_outputs, items.where(items != 0, 1))
        if return_outputs:
            raise ValueError("a part of a sequence has a part of the logits: ask for the loss")
        return mean_of(causal_lm_loss(model, reduction="sum", **part), items) * scales

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's. One rank of each group, which shares sequences, counts.

        Raises:
            ValueError: Another rank saves, which takes all of them. Every rank raises it.
        """
        agree(everyone(self.args.device), "evaluate", [])
        with self.accelerator.one_of_each_group():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """As the trainer's. Parts of logits are joined, if they are asked for."""
        if (parts := parts_of(model)) is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        with torch.no_grad(), self.accelerator.one_of_each_group(on=False):
            loss = None
            if labels is not None:
                with self.compute_loss_context_manager():
                    loss = parts.mean(self.compute_loss(model, dict(inputs)).detach())
            if prediction_loss_only:
                return loss, None, None
            part = split_sequence(model, {k: v for k, v in inputs.items() if k != "labels"})
            with self.compute_loss_context_manager():
                logits = model(**part).logits
            whole = inputs["input_ids"].shape[1]
            return loss, parts.joined(logits)[:, :whole], labels

    def _next_with(self, method: str) -> type:
        """The class behind this one whose method of that name runs."""
        others = type(self).__mro__[type(self).__mro__.index(Zero3Mixin) + 1 :]
        return next(kind for kind in others if method in vars(kind))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The trainer's optimizer, whose groups are made by the parameters' own names."""
        if self._next_with("create_optimizer") is not Trainer:
            given = [model] if model is not None else []
            return super().create_optimizer(*given)  # type: ignore[no-any-return]
        if self.optimizer is None:
            name = str(getattr(self.args.optim, "value", self.args.optim))
            own = self.optimizer_cls_and_kwargs
            asked = f"optim={name!r}" if own is None else f"optimizer_cls_and_kwargs={own[0]}"
            try:
                self.optimizer = self._make_optimizer(name)
                check_optimizer(self.model, self.optimizer)
            except ValueError as error:
                advice = (
                    ". For that, call zero3.shard(model, ...) yourself, make the optimizer from "
                    "such groups, and pass it: optimizers=(optimizer, None)"
                )
                told = f"{error}{advice if 'zero3.param_groups' in str(error) else ''}"
                raise ValueError(f"{asked}: {told}") from error
            self.optimizer = offload_optimizer(self.optimizer)
        return self.optimizer  # type: ignore[no-any-return]

    def _make_optimizer(self, name: str) -> torch.optim.Optimizer:
        if self.optimizer_cls_and_kwargs is None:
            optimizers.refuse_dividing(name)
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        # TRL mixes the parameters of both, pair by pair
        both = getattr(self.args, "sync_ref_model", False)
        models = [self.model, *([self.ref_model] if both else [])]
        decays = set(self.get_decay_parameter_names(twin(self.model)))
        decay = self.args.weight_decay
        return optimizers.make_optimizer(kind, options, models, decay, decays, self.args.device)

    def floating_point_ops(self, inputs: Any) -> int:
        """As the trainer's, which would count the elements of this rank's chunks."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = inputs[name].numel() // self._sequence_parallel if name in inputs else 0
        return 6 * tokens * self._zero3_numel

    # -- saving and loading

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        directory = output_dir if output_dir is not None else self.args.output_dir
        save_pretrained(self.model, directory)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
            torch.save(self.args, os.path.join(directory, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.save(Path(output_dir), self.model, self._plain_optimizer(), self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the trainer has no optimizer yet, and if its state does not fit, the model is to
        stay as it is.
        """

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_rest(
                Path(checkpoint), self.model, self._plain_optimizer(), self.lr_scheduler
            )
            checkpoints.load_weights(Path(checkpoint), self.model)
        # finds no optimizer of its own; TRL's add to it
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        checkpoints.load_weights(Path(self.state.best_model_checkpoint), self.model)

    def _newest_whole_checkpoint(self) -> str | bool:
        """True, with which the trainer goes on as always, if there are no checkpoints at all."""
        found = [
            path
            for path in Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            if path.name.rpartition("-")[2].isdigit()
        ]
        values = {"output_dir": sorted(path.name for path in found)}
        remedy = "Put output_dir on a file system that all ranks see"
        check_alike(self.args.device, "the checkpoints that they see", values, "train", remedy)
        broken: list[str] = []
        for path in sorted(found, key=lambda path: -int(path.name.rpartition("-")[2])):
            try:
                self._check(path)
            except ValueError as error:
                broken.append(str(error))
                warnings.warn(
                    f"resume_from_checkpoint=True passes over {path}: {error}", stacklevel=4
                )
            else:
                return str(path)
        if broken:
            raise ValueError(
                f"no checkpoint in {self.args.output_dir} is whole: {'; '.join(broken)}"
            )
        return True

    def _check(self, checkpoint: Path) -> None:
        """A trainer that goes on from other checkpoints has its own (examples/finetuning)."""
        checkpoints.check(checkpoint, self.args.device)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # type: ignore[no-any-return]


class Zero3Trainer(Zero3Mixin, Trainer):
    """transformers' `Trainer` with `Zero3Mixin`, which says what it does, takes and raises.

    Example::

        data = {"train_dataset": examples, "eval_dataset": held_out}
        trainer = Zero3Trainer(model=model, args=arguments, **data)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model(directory)
    """


def _numel_but_for_embeddings(model: nn.Module) -> int:
    embeddings = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    first: dict[int, tuple[str, int]] = {}
    for name, tensor in named_tensors(model):
        if isinstance(tensor, nn.Parameter):
            first.setdefault(id(tensor), (name, tensor.numel()))
    return sum(numel for name, numel in first.values() if name not in embeddings)


def _generate(model: nn.Module, generate: Any, /, *args: Any, **kwargs: Any) -> Any:
    with resident(model):
        return generate(*args, **kwargs)


def _library_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _without_logits(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    return {"loss": causal_lm_loss(model, **inputs)}


@contextmanager
def _ends_together(trainer: Zero3Mixin) -> Iterator[None]:
    """Every rank enters it. A rank that raises inside, or has ended, leaves a note; the others find
    it when the transfers with it fail.

    That is when it has left the group, or at the group's timeout. It costs one small collective at
    the beginning.

    Raises:
        Exception: With the rank before the message, of the same type where that is ValueError,
            TypeError, RuntimeError or OSError.
    """
    device = trainer.args.device
    communicator = communicator_for(None, device)
    if communicator.world_size == 1:
        yield
        return
    run = communicator.exchange(os.urandom(8), device)[0].hex()
    rank, board = communicator.rank, board_for(communicator)

    def leave(text: str) -> None:
        with suppress(RuntimeError):  # the process that keeps the notes may be gone
            if board is not None:
                board.post(f"{run}/{rank}", text)

    try:
        yield
    except Exception as error:
        everyone = range(communicator.world_size)
        posted = () if board is None else (board.posted(f"{run}/{each}") for each in everyone)
        said = str(error) if type(error) in _KEPT_KINDS else f"{type(error).__name__}: {error}"
        # what ranks have agreed upon names one already
        said = said if re.match(r"ranks? (\d|differ)", said) else f"rank {rank}: {said}"
        note = f"{said} (which ended this run)"
        others = [text for text in posted if text and text != note]
        leave(note)
        kind = type(error) if type(error) in _KEPT_KINDS else RuntimeError
        raise kind("\n".join([*others, said])) from error
    leave(f"rank {rank} has ended train() after {trainer.state.global_step} steps")
