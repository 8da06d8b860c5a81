"""Zero3Layer: a module whose parameters, gradients and optimizer state are spread over all ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from .core.autograd import mark_upstream
from .core.construction import Request, build_state
from .core.layer_state import LayerState
from .core.module_overrides import INSTEAD_OF_STATE_DICT, check_conversion, guard, refuse, refuse_new_parameters
from .core.parameters import own_modules
from .core.runtime import Runtime
from .core.tree import tensors_in
from .policy import ShardingPolicy

__all__: list[str] = []


class Zero3Layer(nn.Module):
    """Shards one module, or a few consecutive ones, over the ranks of a process group (ZeRO stage 3).

    Every rank keeps 1/W of the parameters as flat chunks; the full parameters exist only around the layer's own
    forward and backward. Rank 0's values win. Wrap every rank's module in the same order, freeze before wrapping.

        layers = [Zero3Layer(block) for block in blocks]
        model = Zero3Sequential(layers)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk())

    Args:
        module: any module without sharded parameters of its own; one that holds `Zero3Layer`s keeps what they left.
        rank, world_size: checked against the process group; None takes the group's.
        device: where the layer computes and its chunks live; None: where the module's tensors are.
        dtype: checks the dtype of the trainable parameters, which is that of the optimizer's master copy. Converts nothing.
        policy: see `ShardingPolicy`.
        process_group: the ranks that share the layer; None: the default group, or this process alone.

    Raises:
        ValueError, TypeError: on every rank alike, before anything has changed; the text names the rank that is wrong.
        RuntimeError: a launcher started several processes, but there is no process group.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        policy: ShardingPolicy = ShardingPolicy(),  # noqa: B008 (frozen)
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self._wrap(Request(module, rank, world_size, device, dtype, policy, process_group))

    @classmethod
    def from_request(cls, request: Request) -> Zero3Layer:
        """For `shard`, which says more about a layer than a user needs to."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._wrap(request)
        return layer

    def _wrap(self, request: Request) -> None:
        self._runtime: Runtime | None = None
        self._state = build_state(request, is_layer)
        self.module = request.module
        self._state.registry = self._parameters
        self._parameters.update(self._state.chunk_names())
        for _, module in own_modules(self.module, is_layer):
            guard(module, is_layer)
        refuse_new_parameters(self)

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """This rank's trainable chunks, 1-D `[S]`, one a dtype, of this layer and those inside it; [] if it has none."""
        return [chunk for layer in layers_of(self) for chunk in layer._state.trainable()]

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating chunk, in which values are stored and updated. See `report` for what is computed in what."""
        return floating_dtype(self)

    # -- one call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        if runtime is None or (len(runtime.layers) == 1 and torch.is_grad_enabled()):
            runtime = self._find_runtime(args, kwargs)
        return run_sharded(runtime, self._state, self, self.module, args, kwargs)

    def _find_runtime(self, args: Any, kwargs: Any) -> Runtime:
        """Layers called one by one, by a plain module, find each other through the graph; a layer that finds none is a model."""
        upstream = mark_upstream(tensors_in((args, kwargs)))
        own = self._runtime or adopt(self, ordered=False)
        if not isinstance(upstream, Runtime) or upstream is own or not upstream.serves(self._state.communicator, self._state.device):
            return own
        if own.awaits_backward:  # it has to walk that forward itself
            return own
        own.reset()
        for layer in layers_of(self):
            upstream.join(layer._state)
            layer._runtime = upstream
        return upstream

    # -- a module like the one it wraps

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapped module takes the wrapper's own name, so that parameters are called what they are unwrapped."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def extra_repr(self) -> str:
        state = self._state
        chunks = ", ".join(
            f"{name}: [{chunk.numel()}] {str(chunk.dtype).removeprefix('torch.')}"
            for name, chunk in state.chunk_names().items()
            if chunk is not None
        )
        return f"rank {state.communicator.rank} of {state.communicator.world_size}, {chunks or 'no parameters'}"

    # -- what would copy or convert a rank's slice as if it were the whole

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        if not self._state.pinned:
            refuse("state_dict()", "a state dict of chunks has neither the names nor the shapes of the model", INSTEAD_OF_STATE_DICT)
        return self.module.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not self._state.pinned:
            refuse("load_state_dict()", "the model's values lie in chunks on all ranks", "zero3.load_full_state_dict(model, state_dict)")
        for name in [name for name in state_dict if name.startswith(prefix)]:  # the names are the unwrapped module's
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if not self._state.pinned:
            refuse("load_state_dict()", "the model's values lie in chunks on all ranks", "zero3.load_full_state_dict(model, state_dict)")
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse(
            "deepcopy",
            "a copy would need collectives, which hang unless every rank copies",
            "zero3.full_state_dict(model), and wrap another module",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse("pickle", "a pickle would hold one rank's slice only", "zero3.full_state_dict(model)")

    def _apply(self, fn: Any, recurse: bool = True) -> Zero3Layer:
        """`model.to()`, `.double()`, `.share_memory()`: passes what changes nothing, refuses the rest before it begins."""
        for layer in layers_of(self):
            for chunk in layer._state.chunks:
                check_conversion(chunk.shard.new_empty(1), fn, f"layer {layer._state.label}")
        if recurse:
            self.module._apply(fn)  # type: ignore[no-untyped-call]
        return self


def run_sharded(runtime: Runtime, state: LayerState, entry: nn.Module, module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One forward of a sharded module: fetched before, released after. `entry`: what the user called, if it is the outermost."""
    with runtime.forward_pass(entry):
        runtime.pre_forward(state)
        args, kwargs = state.casting.inputs(args, kwargs)
        with _uncached_autocast():
            output = state.casting.output(module(*args, **kwargs))
        holder = module if isinstance(module, nn.Module) else entry
        return runtime.post_forward(state, output, kept=(args, kwargs, _attributes(holder)))


_PARTS = frozenset({bool, int, float, str, dict, OrderedDict, set, type(None)})  # of any module; by type, for that is told at once


def _attributes(holder: nn.Module) -> list[Any]:
    """What modules may keep of a forward as plain attributes: caches, auxiliary losses. (A long list is other data.)"""
    found: list[Any] = []
    modules = [holder]
    for module in modules:
        for value in module.__dict__.values():
            if type(value) in _PARTS:
                continue
            if isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and len(value) < 100):
                found.append(value)
        modules += [child for child in module._modules.values() if child is not None and not is_layer(child)]
    return found


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, Zero3Layer)


def layers_of(model: nn.Module) -> list[Zero3Layer]:
    """Every layer in `model`, outer before inner, once."""
    return [module for module in model.modules() if isinstance(module, Zero3Layer)]


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating parameter, as Hugging Face's `model.dtype`; torch's default if it has none."""
    dtypes = (chunk.shard.dtype for layer in layers_of(model) for chunk in layer._state.chunks)
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.get_default_dtype())


def adopt(root: nn.Module, *, ordered: bool, outer: Sequence[LayerState] = ()) -> Runtime:
    """One runtime for all layers in `root`, in place of what they had. `ordered`: they are called in the order they stand in."""
    layers = layers_of(root)
    for name, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, Zero3Layer) and name:
            module._state.label = f"{name!r} ({type(module.module).__name__})"
    states = [*outer, *(layer._state for layer in layers)]
    runtime = Runtime(states, states[0].policy, ordered=ordered, depths=[*(0 for _ in outer), *_depths(root, len(outer))])
    for layer in layers:
        if layer._runtime is not None:
            layer._runtime.reset()
        layer._runtime = runtime
    return runtime


def _depths(module: nn.Module, depth: int, seen: set[nn.Module] | None = None) -> Iterator[int]:
    """In how many layers each layer in `module` lies, outer before inner."""
    seen = set() if seen is None else seen
    if module not in seen:
        seen.add(module)
        if isinstance(module, Zero3Layer):
            yield depth
            depth += 1
        for child in module._modules.values():
            if child is not None:
                yield from _depths(child, depth, seen)


class _uncached_autocast:
    """Within a layer, autocast keeps no cast copies: they would outlive the layer's full parameters, and a step."""

    __slots__ = ("_enabled",)

    def __enter__(self) -> None:
        self._enabled = torch.is_autocast_cache_enabled()
        if self._enabled:
            torch.set_autocast_cache_enabled(False)

    def __exit__(self, *exc: object) -> None:
        if self._enabled:
            torch.set_autocast_cache_enabled(True)
