"""The engines by which TRL's trainers generate get a sharded model's weights, and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of
from ..comm.plain_values import name_of
from ..guards.module_overrides import Override
from ..huggingface.outputs import has_adapters
from ..huggingface.stream_weights import stream_weights
from ..offload.parked import parked

__all__: list[str] = []


class VLLMWeights:
    """In TRL's `VLLMGeneration`, what gathers and sends weights is this object's. So vLLM gets the
    names and the bits of `save_pretrained` or, with adapters, of `save_merged`.
    """

    def __init__(
        self, engine: Any, models: Callable[[], list[nn.Module]], optimizer: Callable[[], Any]
    ) -> None:
        """`models`: the one that generates, and others that leave the device meanwhile."""
        self._engine, self._models, self._optimizer = engine, models, optimizer
        self._sync: Callable[[], None] = engine.sync_weights
        self._generate: Callable[..., Any] = engine.generate
        self._stream: Any = None
        vars(engine).update(
            _iter_named_params=self._weights, sync_weights=self._synced, generate=self._generated
        )

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """vLLM's client joins tensors later: what it gets has memory of its own. Who sends nothing
        takes part in the rest.
        """
        if self._engine.mode == "server":
            if not self._engine.accelerator.is_main_process:
                self._stream.close()
            return ((name, tensor.clone()) for name, tensor in self._stream)
        return iter(self._stream)

    def _synced(self) -> None:
        """Every rank begins the stream now, and not when it is first asked."""
        engine, model = self._engine, self._models()[0]
        stream: Any = stream_weights(model, merge_adapters=has_adapters(model))
        self._stream = stream
        if engine.mode == "server" and engine._weight_metadata is None:
            described = [
                (output.name, name_of(output.dtype), list(output.shape))
                for output in stream.outputs
            ]
            vars(engine).update(_weight_metadata=described)
        try:
            self._sync()
        finally:
            stream.close()  # an engine may have raised on this rank alone
            self._stream = None

    def _generated(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        if engine.mode != "colocate" or not engine.enable_sleep_mode:
            return self._generate(*args, **kwargs)
        if engine._llm_weights_sleeping:  # before it has the memory
            engine.sync_weights()
        with ExitStack() as left:
            for number, model in enumerate(self._models()):
                left.enter_context(parked(model, self._optimizer() if not number else None))
            return self._generate(*args, **kwargs)


def keep_masters(model: nn.Module) -> None:
    """`model.to(dtype)` of TRL does nothing if layers compute in that dtype anyway."""
    Override(model, "to", _to)


def _to(model: nn.Module, to: Callable[..., nn.Module], /, *args: Any, **kwargs: Any) -> nn.Module:
    computes = {state.policy.param_dtype for state in states_of(model)} - {None}
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype) and args[0] in computes:
        return model
    return to(*args, **kwargs)
