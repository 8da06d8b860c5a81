"""A module that takes another module's place in a model. To all who walk over the model, the two
are one.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Iterator
from typing import Any, Self

from torch import nn

from ..core.parameters import IN_MODEL, WRAPPED
from .compiled import REASON, end_graph

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
