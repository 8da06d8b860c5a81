"""Pickles read, and written, as the data that they are: nothing is imported, and nothing that a
pickle names is called.

`pickletools` takes a pickle apart into its operations. What they build of numbers, strings and
containers is built; what they would call stays a `Made`, with the name and the arguments, but for
the few names that `make` knows.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

__all__: list[str] = []

_PLAIN = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})


def _dict(items: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


_NEW: Mapping[str, Callable[[list[Any]], Any]] = MappingProxyType(
    {"LIST": list, "TUPLE": tuple, "SET": set, "FROZENSET": frozenset, "DICT": _dict}
)
_FILLED = MappingProxyType({"APPEND": list, "SETITEM": dict, "ADDITEM": set})
# how each is opened and closed, in what is written
_MARKS: Mapping[type, tuple[bytes, bytes]] = MappingProxyType(
    {list: (b"](", b"e"), tuple: (b"(", b"t"), dict: (b"}(", b"u")}
)


@dataclass(frozen=True)
class Global:
    """What a pickle would import: `torch.float32`."""

    name: str


@dataclass(eq=False)
class Made:
    """What a pickle would make by calling what `name` names, and then fill with `state`."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False  # whether the call is to the class's `__new__`


Make = Callable[[str, tuple[Any, ...]], Any]


def read(text: bytes, what: str, make: Make, storage: Callable[[Any], Any] | None = None) -> Any:
    """The value of a pickle. `make` says what a call of a name with arguments becomes, `storage`
    what a persistent id stands for. Raises ValueError if it is malformed, or does what pickles of
    checkpoints don't. `what` names it.
    """
    machine = _Machine(make, storage)
    try:
        for operation, argument, _ in pickletools.genops(text):
            machine.take(operation, argument)
        (value,) = machine.stack
        return value
    except Exception as error:  # whatever comes of a damaged one, and of what it says
        raise ValueError(
            f"{what} is no pickle that can be read: {type(error).__name__}: {error}"
        ) from None


class _Machine:
    def __init__(self, make: Make, storage: Callable[[Any], Any] | None) -> None:
        self.stack: list[Any] = []  # since the last mark
        self._below: list[list[Any]] = []  # since each mark before
        self._memo: dict[int, Any] = {}
        self._make = make
        self._storage = storage

    def take(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        name, after = operation.name, operation.stack_after
        if operation.arg is not None and after and after[0] is not pickletools.anyobject:
            self.stack.append(argument)  # a number, text or bytes
        elif name == "MARK":
            self._below.append(self.stack)
            self.stack = []
        elif name == "MEMOIZE" or "PUT" in name:
            self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]
        elif name not in ("PROTO", "FRAME", "STOP"):
            taken = self._taken(operation.stack_before)
            if after:
                self.stack.append(self._made(name, argument, taken))

    def _taken(self, kinds: list[pickletools.StackObject]) -> list[Any]:
        """What an operation takes from the stack, as `pickletools` tells."""
        values: list[Any] = []
        if pickletools.markobject in kinds:
            values, self.stack = self.stack, self._below.pop()
            kinds = kinds[: kinds.index(pickletools.markobject)]
        if len(self.stack) < len(kinds):
            raise IndexError("the stack is empty")
        first = len(self.stack) - len(kinds)
        values = self.stack[first:] + values
        del self.stack[first:]
        return values

    def _made(self, name: str, argument: Any, taken: list[Any]) -> Any:
        """What comes to the stack in place of what was taken."""
        if name in _PLAIN:
            return _PLAIN[name]
        if (kind := name.removeprefix("EMPTY_").rstrip("123S")) in _NEW:
            return _NEW[kind](taken)
        if kind in _FILLED:
            return _filled(_FILLED[kind], *taken)
        match name, taken:
            case ("GET" | "BINGET" | "LONG_BINGET", _):
                return self._memo[argument]
            case ("GLOBAL", _):  # as Python 2 said
                return Global(argument.replace(" ", ".", 1).replace("__builtin__.", "builtins."))
            case ("STACK_GLOBAL", [module, inner]):
                return Global(f"{module}.{inner}")
            case ("REDUCE" | "NEWOBJ", [called, arguments]):
                return self._call(called, arguments)
            case ("NEWOBJ_EX", [called, arguments, keywords]):
                return self._call(called, (*arguments, keywords))
            case ("BUILD", [found, state]):
                if isinstance(found, Made):
                    found.state = state
                return found
            case ("BINPERSID", [identifier]) if self._storage is not None:
                return self._storage(identifier)
        raise ValueError(f"the operation {name}")

    def _call(self, called: Any, arguments: Any) -> Any:
        if not isinstance(called, Global | Made) or not isinstance(arguments, tuple):
            raise TypeError(f"{called!r:.80} is called")
        if isinstance(called, Global):
            return self._make(called.name, arguments)
        return Made(f"{called.name}()", arguments)


def _filled(kind: type, found: Any, *items: Any) -> Any:
    """`found` with more in it. (A subclass of list or dict that nobody knows can't be filled.)"""
    if not issubclass(type(found), kind):
        raise TypeError(f"{found!r:.80} is filled like a {kind.__name__}")
    (found.extend if kind is list else found.update)(_dict(items) if kind is dict else items)
    return found


def write(value: Any, tensor: Callable[[Any], Made | None]) -> bytes:
    """A pickle (protocol 2) of plain values, `Global` and `Made`. `tensor` says how to make what is
    neither, None if it can't. Raises TypeError for other values.
    """
    out = bytearray(b"\x80\x02")
    _write(value, tensor, out)
    return bytes(out + b".")


@dataclass(frozen=True)
class Persistent:
    """In what is written: the persistent id of a storage."""

    identifier: tuple[Any, ...]


def _write(value: Any, tensor: Callable[[Any], Made | None], out: bytearray) -> None:
    if value is None or isinstance(value, bool):
        out += b"N" if value is None else b"\x88" if value else b"\x89"
    elif type(value) is int:
        text = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8a" + struct.pack("<B", len(text)) + text
    elif type(value) is float:
        out += b"G" + struct.pack(">d", value)
    elif type(value) is str:
        text = value.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(text)) + text
    elif type(value) in _MARKS:
        opened, closed = _MARKS[type(value)]
        out += opened
        for item in chain.from_iterable(value.items()) if type(value) is dict else value:
            _write(item, tensor, out)
        out += closed
    elif isinstance(value, Global):
        module, _, name = value.name.rpartition(".")
        out += f"c{module}\n{name}\n".encode()
    elif isinstance(value, Persistent):
        _write(value.identifier, tensor, out)
        out += b"Q"
    elif (made := value if isinstance(value, Made) else tensor(value)) is not None:
        _write(Global(made.name), tensor, out)
        _write(made.arguments, tensor, out)
        out += b"\x81" if made.new else b"R"
        if made.state is not None:
            _write(made.state, tensor, out)
            out += b"b"
    else:
        raise TypeError(f"a {type(value).__qualname__} could only be pickled by its own class")
