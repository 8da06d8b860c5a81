"""Zero3Layer: a module whose parameters, gradients and optimizer state are spread over all ranks.

It stands in its module's place in a model. To all who walk over the model, the two are one.
"""

from __future__ import annotations

import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn import functional

from .build.construction import Request, agree_on, all_but, build_state
from .build.with_experts import with_experts
from .comm.factory import is_dealt, parts_over
from .comm.plain_values import name_of
from .conductors.noting import keep_transfers
from .core.autograd import (
    attributes_of,
    mark_upstream,
    tensors_in,
    transforms_under_way,
)
from .core.layer_state import LayerState
from .core.runtime import ForwardPass, Pace, Runtime
from .core.schedule import OwnOrder
from .guards.calls import check_requires_grad, refuse_transforms
from .guards.compiled import REASON, end_graph, ends_graphs
from .guards.module_overrides import (
    IN_MODEL,
    Override,
    check_conversion,
    enter_model,
    guard,
    guard_layer,
    refuse,
    refuse_load_state_dict,
    refuse_state_dict,
)
from .guards.wrappers import ATTENTION, refuse_context_parallel, refuse_ulysses, refuse_wrappers
from .modules import WRAPPED, own_module_name, own_modules
from .policy import ShardingPolicy, unlike
from .stages.dynamic import DynamicOrder

__all__: list[str] = []


_SHARED = (
    "_modules", "_buffers", "_non_persistent_buffers_set", "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


# a layer's own, written once. A block may have attributes of these names: later writes are the
# block's
_ONCE = ("_state", "_listed")


class _Posing:
    """Its `isinstance` answers for the class of the wrapped module, too: models ask which block
    they call.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        module: nn.Module | None = vars(self).get(WRAPPED)
        return type(self) if module is None else module.__class__

    @property
    def _is_fsdp_managed_module(self) -> bool:
        """torch.compile asks for it before it traces the use of a module. Its own `isinstance`
        looks at `type`, so a graph ends here.
        """
        end_graph(REASON)
        return False


class StandIn(_Posing, nn.Module):
    """Wraps a module, which is none of its submodules: it has that module's own submodules,
    buffers, mode and attributes.

    So whoever walks over the model meets the two once, under the module's name. Forward hooks are
    the stand-in's own, and run around those of the module.
    """

    def stand_for(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        """Wraps `module`. Returns what `parameters()` lists beside the module's own parameters:
        empty, for the caller to fill.
        """
        own, listed = vars(self), dict[str, nn.Parameter | None]()
        own |= {name: vars(module)[name] for name in _SHARED}
        own["_parameters"] = ChainMap(module._parameters, listed)
        own[WRAPPED] = module
        del own["training"]
        return listed

    @property
    def module(self) -> Any:
        """The wrapped module."""
        return self.__dict__[WRAPPED]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if WRAPPED not in self.__dict__:
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Writes stay here. But in a model they reach the wrapped module: whoever walks over a
        model sets flags at its modules.
        """
        own = self.__dict__
        if name == "module" and WRAPPED in own:  # torch would take another one for a submodule
            raise AttributeError(
                f"the module of this {type(self).__name__} stays the one that it was made with"
            )
        reaches = WRAPPED in own and (
            name in _ONCE if name in own else name == "training" or IN_MODEL in own
        )
        if reaches and not hasattr(type(self), name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if WRAPPED in self.__dict__ and name not in self.__dict__ and not hasattr(type(self), name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The wrapped module's. To torch's tracker of modules (in CommDebugMode) the wrapped module
        is one, the only one.

        It tells modules apart by names that it makes of these, and leaves its hooks behind where
        two have one name.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed._tools.mod_tracker":
            return iter([("module", self.module)])
        return super().named_children()

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)  # it may have a `train` of its own
        return self

    def __repr__(self) -> str:
        module = repr(self.module).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {self.extra_repr()}\n  (module): {module}\n)"


class Zero3Layer(StandIn):
    """Shards one module over the ranks of a process group (ZeRO stage 3).

    Each rank keeps 1/W of the parameters, as flat *chunks*. The full parameters exist only while
    the layer itself computes, in forward and in backward. All ranks wrap the same modules in the
    same order, and rank 0's values win. Freeze what should not train (`requires_grad_(False)`)
    before wrapping.

    A single layer works as a model. In a model it stands for the module that it wraps, which is its
    attribute `module`: `isinstance` answers for both classes, and submodules, buffers and mode are
    the module's. Attributes that the layer lacks are read from the module; in a model they are
    written to it as well. Length and items are the module's alone (`layer.module[0]`).
    `state_dict`, `deepcopy`, pickle and conversions such as `.half()` would see only one rank's
    slice, so they raise RuntimeError, which names the function to use instead.

    Args:
        module: Any module that is not sharded itself. A `Zero3Layer` inside it keeps its own
            parameters; this layer takes the others.
        rank: This process's number in the group. It is only checked; None takes the group's.
        world_size: The number of ranks in the group. It is only checked; None takes the group's.
        device: Where the layer computes and its chunks live. None: where the module's tensors are,
            or those of layers inside it.
        dtype: The dtype that every trainable parameter must have, because the optimizer updates in
            it. It is only checked; nothing is converted. None: any dtype.
        policy: Every choice about sharding, see `ShardingPolicy`.
        process_group: The ranks that share the layer: a process group or a `DeviceMesh`, see
            `shard`. None: as there.

    Raises:
        ValueError: A value is wrong, or ranks have different modules or policies. All ranks raise
            the same error, which names the wrong rank, and nothing has changed.
        TypeError: An argument has the wrong type. Again all ranks raise it, and nothing has
            changed.
        RuntimeError: A launcher started several processes, but there is no process group.

    Example::

        layers = [zero3.Zero3Layer(block) for block in blocks]
        model = zero3.Zero3Sequential(layers)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk())

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models, 2020.
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
        if parts_over(process_group) > 1:
            raise ValueError(
                "process_group is a mesh with sp, whose ranks hold parts of the same sequences: "
                "that takes the whole model. Call zero3.shard(model, process_group=mesh)"
            )
        request = Request(module, rank, world_size, device, dtype, policy, process_group)
        at_home = is_dealt(process_group) or getattr(policy, "expert_parallel", False)
        if at_home and isinstance(module, nn.Module):
            request = self._with_experts(request)
        self._wrap(build_state(request, is_layer), module, is_layer)
        self._list_chunks()

    @classmethod
    def _with_experts(cls, request: Request) -> Request:
        """Makes the experts inside layers of their own. All ranks agree before anything changes."""
        requests, error = [request], None
        try:
            requests = with_experts(requests, is_layer)
        except (TypeError, ValueError) as caught:  # the other ranks wait to hear of it
            error = caught
        first, *inside = requests
        made = {id(each.module) for each in inside}
        will_be_layer = lambda module: is_layer(module) or id(module) in made  # noqa: E731
        agree_on(requests, will_be_layer, error, caller="Zero3Layer")
        for each in inside:
            put(request.module, each.module, cls._from_request(each, will_be_layer)[0])
        return first

    @classmethod
    def _from_request(
        cls, request: Request, will_be_layer: Callable[[nn.Module], bool]
    ) -> list[Zero3Layer]:
        """Makes a layer for `shard`, whose requests hold more than the constructor's arguments.
        Returns one for each of its modules.

        `will_be_layer` is True for layers, and for modules that other requests make layers.
        """
        inner = all_but(request, will_be_layer)
        state, layers = build_state(request, inner), [cls.__new__(cls) for _ in request.modules]
        for layer, module in zip(layers, request.modules, strict=True):
            nn.Module.__init__(layer)
            layer._wrap(state, module, inner)
        layers[0]._list_chunks()
        return layers

    def _wrap(
        self, state: LayerState, module: nn.Module, is_inner_layer: Callable[[nn.Module], bool]
    ) -> None:
        self._runtime: Runtime | None = None
        self._state = state
        self._listed = self.stand_for(module)  # beside its own parameters
        for _, inner in own_modules(module, is_inner_layer):
            guard(inner, is_layer)
        guard_layer(self)

    def _list_chunks(self) -> None:
        self._state.chunks.list_in(self._listed)

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """This rank's trainable chunks of this layer and of the layers inside it. They are the
        parameters for the optimizer.

        Returns:
            One 1-D tensor `[S]` for each dtype of each layer, or `[]` if nothing is trainable.
        """
        return [chunk for state in states_in(self) for chunk in state.chunks.trainable()]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the first floating chunk is stored and updated. `report` tells the
        dtypes of compute.
        """
        return floating_dtype(self)

    # -- one call

    @ends_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        if runtime is None or (len(runtime.layers) == 1 and torch.is_grad_enabled()):
            runtime = self._find_runtime(args, kwargs)
        return run_sharded(runtime, self._state, self, self.__dict__[WRAPPED], args, kwargs)

    def _find_runtime(self, args: Any, kwargs: Any) -> Runtime:
        """The layer's runtime. If the inputs come from another layer, in the graph, this layer
        joins that layer's runtime.

        So layers that a plain module calls one by one share a runtime. Otherwise the layer is a
        model with its own runtime.
        """
        upstream = mark_upstream(tensors_in((args, kwargs)))
        own = self._runtime or adopt(self, ordered=False)
        if (
            not isinstance(upstream, Runtime)
            or upstream is own
            or not upstream.serves(self._state.communicator, self._state.device)
        ):
            return own
        if own.awaits_backward:  # that backward needs this runtime
            return own
        own.reset()
        for layer in layers_of(self):
            check_alike([upstream.layers[0], layer._state])
            upstream.take_in(layer._state)
            layer._runtime = upstream
        return upstream

    # -- what tools ask of a module

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The layer and the modules inside its module. Raises if a wrapper of another library calls
        it.
        """
        refuse_wrappers(lambda: self._state.subject.name)
        yield from super().named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The chunks, and the parameters of modules inside. Raises if a wrapper of another library
        calls it.
        """
        refuse_wrappers(lambda: self._state.subject.name)
        return super().named_parameters(*args, **kwargs)

    def extra_repr(self) -> str:
        state = self._state
        chunks = [
            f"{name}: [{chunk.numel()}] {name_of(chunk.dtype)}"
            for name, chunk in state.chunks.names().items()
            if chunk is not None
        ]
        return (
            f"rank {state.communicator.rank} of {state.communicator.world_size}, "
            f"{', '.join(chunks) or 'no parameters'}"
        )

    # -- methods that would copy or convert one rank's slice as if it were the whole model

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        if not self._state.pinned:
            refuse_state_dict()
        found: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if not self._state.pinned:
            refuse_load_state_dict()
        self.module._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if not self._state.pinned:
            refuse_load_state_dict()
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse(
            "deepcopy",
            "a copy would need collectives, which hang unless every rank copies",
            "zero3.full_state_dict(model), and wrap another module",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse(
            "pickle", "a pickle would hold one rank's slice only", "zero3.full_state_dict(model)"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Zero3Layer:
        """Called by `model.to()`, `.double()`, `.share_memory()`: raises if any chunk would change,
        before anything changes.
        """
        for state in states_in(self):
            for chunk in state.chunks:
                check_conversion(chunk.shard.new_empty(1), fn, f"layer {state.label}")
        if recurse:
            self.module._apply(fn)
        return self


def run_sharded(
    runtime: Runtime,
    state: LayerState,
    entry: nn.Module,
    module: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs one forward of a sharded module, which is fetched before it and released after it.
    `entry`: the module that was called.
    """
    with ForwardPass(runtime, entry):
        if transforms_under_way():
            refuse_transforms(state)
        runtime.pre_forward(state, (args, kwargs))
        with state.spans.forward:
            output = state.call(module, *args, **kwargs)  # [F3]
        holder = module if isinstance(module, nn.Module) else entry
        return runtime.post_forward(
            state, output, kept=[*args, *kwargs.values(), *attributes_of(holder, Zero3Layer)]
        )


class _RootEntry:
    """What stands around the `forward` of a module outside the layers of a sharded model: it
    fetches the root's own layer first.
    """

    def __init__(self, root: LayerState, runtime: Runtime) -> None:
        # the model holds the root, its layers the runtime
        self.root, self.runtime = weakref.ref(root), weakref.ref(runtime)

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        root, runtime = self.root(), self.runtime()
        if root is None or runtime is None:
            raise RuntimeError(
                f"the sharded model that this {type(module).__name__} belongs to is gone"
            )
        if runtime.stack.is_under_way(root):
            return forward(*args, **kwargs)
        if functional.scaled_dot_product_attention is not ATTENTION:
            refuse_context_parallel()
        if "deepspeed" in sys.modules:
            refuse_ulysses(module)
        return run_sharded(runtime, root, module, forward, args, kwargs)


def enter_root(
    module: nn.Module, root: LayerState, runtime: Runtime, name: str = "forward"
) -> None:
    """From now on the method `name` of `module` fetches the root's own layer first."""
    Override(module, name, _RootEntry(root, runtime))


def root_entered(module: nn.Module) -> tuple[LayerState, Runtime] | None:
    """The root's own layer, if the forward of `module` fetches it first, and its runtime."""
    forward = vars(module).get("forward")
    entry = forward.around if isinstance(forward, Override) else None
    root, runtime = (
        (entry.root(), entry.runtime()) if isinstance(entry, _RootEntry) else (None, None)
    )
    return None if root is None or runtime is None else (root, runtime)


def run_in(module: nn.Module, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs `function` where the own parameters of `module` are shown, as a call of the module does.
    The module may be a layer, or in one, or outside of the layers, or in no sharded model.
    """
    if isinstance(module, Zero3Layer):
        runtime, state = module._find_runtime(args, kwargs), module._state
        if runtime.stack.is_under_way(state):
            return function(*args, **kwargs)
        return run_sharded(runtime, state, module, function, args, kwargs)
    if (entered := root_entered(module)) is not None and not entered[1].stack.is_under_way(
        entered[0]
    ):
        return run_sharded(entered[1], entered[0], module, function, args, kwargs)
    return function(*args, **kwargs)


def put(model: nn.Module, module: nn.Module, layer: Zero3Layer) -> None:
    """Puts `layer` into every place in the model that has `module`. A shared module has several
    places.
    """
    for owner in list(model.modules()):
        for name, child in owner._modules.items():
            if child is module:
                owner._modules[name] = layer
    enter_model(layer)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, Zero3Layer)


def layers_of(model: nn.Module) -> list[Zero3Layer]:
    """Every layer in `model`, each once, outer before inner."""
    return [module for module in model.modules() if isinstance(module, Zero3Layer)]


def state_behind(module: nn.Module) -> LayerState | None:
    """The layer that this module is, or, of a sharded model, the root's own layer."""
    return module._state if isinstance(module, Zero3Layer) else vars(module).get("_zero3_root")


def states_in(model: nn.Module) -> list[LayerState]:
    """The state of every layer in `model`, each once: several modules may form one layer."""
    return list(dict.fromkeys(layer._state for layer in layers_of(model)))


def runtimes_in(model: nn.Module) -> list[Runtime]:
    """The runtimes that layers in `model` have already, each once."""
    return list(
        dict.fromkeys(layer._runtime for layer in layers_of(model) if layer._runtime is not None)
    )


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating parameter, as Hugging Face's `model.dtype`, or torch's
    default dtype if there is none.
    """
    dtypes = (chunk.shard.dtype for state in states_in(model) for chunk in state.chunks)
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.get_default_dtype())


def adopt(
    root: nn.Module,
    *,
    ordered: bool,
    outer: Sequence[LayerState] = (),
    order: OwnOrder[LayerState] | None = None,
) -> Runtime:
    """Gives all layers in `root` one new runtime. `ordered`: they are called in their order in the
    model. `order`: one that says itself how they are called.
    """
    layers = layers_of(root)
    labels: dict[LayerState, dict[nn.Module, str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, Zero3Layer) and name:
            labels.setdefault(module._state, {})[module] = (
                f"{own_module_name(name)!r} ({type(module.module).__name__})"
            )
    for state, names in labels.items():
        state.rename(" and ".join(names.values()))
    states = [*outer, *(layer._state for layer in layers)]
    check_alike(states)
    policy = states[0].policy
    runtime = Runtime(
        states,
        Pace(
            depth=policy.prefetch_depth,
            compare_every=policy.compare_every,
            own_backup_group=policy.separate_backup_group,
            resident_bytes=policy.resident_bytes,
        ),
        ordered=ordered,
        own_order=order
        or _own_order(states, [*(0 for _ in outer), *_depths(root, len(outer), set())]),
        called_by=_called_by,
        check_toggled=check_requires_grad,
    )
    for layer in layers:
        if layer._runtime is not None:
            layer._runtime.reset()
        layer._runtime = runtime
    keep_transfers(states)
    return runtime


def _own_order(states: Sequence[LayerState], depths: Sequence[int]) -> DynamicOrder | None:
    """`depths`: for each layer, how many it is inside of. Each module has its place."""
    policy = states[0].policy
    nested = zip(states, depths, strict=True)
    return DynamicOrder(nested, policy.prefetch_depth) if policy.dynamic else None


def check_alike(layers: Sequence[LayerState]) -> None:
    """
    Raises:
        ValueError: Layers that share a runtime, because a plain module calls one after another,
            differ in a field of the whole model.
    """
    if (error := unlike((f"layer {state.label}", state.policy) for state in layers)) is not None:
        raise error


def _called_by(module: nn.Module) -> list[LayerState]:
    """The layers that a call of `module` may call: those in it, and the root's own layer if its
    `forward` enters that.
    """
    entered = root_entered(module)
    return [*states_in(module), *([] if entered is None else [entered[0]])]


def _depths(module: nn.Module, depth: int, seen: set[nn.Module]) -> Iterator[int]:
    """For each layer in `module`, outer before inner: how many layers it is inside of."""
    if module not in seen:
        seen.add(module)
        if is_layer(module):
            yield depth
            depth += 1
        for child in module.children():
            yield from _depths(child, depth, seen)
