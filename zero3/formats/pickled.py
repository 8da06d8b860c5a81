"""Pickles read, and written, as the data that they are: nothing is imported, and nothing that a
pickle names is called.

`pickletools` takes a pickle apart into its operations. What they build of numbers, strings and
containers is built; what they would call stays a `Made`, with the name and the arguments, but for
the few names that `make` knows.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__: list[str] = []

_CONSTANTS = (
    "INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2", "FLOAT", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip
_PLAIN = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})
_NEW = MappingProxyType(
    {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
)
_LENGTHS = MappingProxyType({"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3})
_CONTAINERS = (
    "LIST", "TUPLE", "DICT", "FROZENSET", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS",
    "POP", "POP_MARK", "DUP",
)  # fmt: skip
_WITHOUT_EFFECT = ("PROTO", "FRAME")


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
    what a persistent id stands for.

    Raises:
        ValueError: it is malformed, or does what pickles of checkpoints don't. `what` names it.
    """
    machine = _Machine(make, storage)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escape sequences that Python does not know
            for operation, argument, _ in pickletools.genops(text):
                if operation.name == "STOP":
                    (value,) = machine.stack
                    return value
                machine.take(operation.name, argument)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        UnicodeDecodeError,
    ) as error:
        raise ValueError(
            f"{what} is no pickle that can be read: {type(error).__name__}: {error}"
        ) from None
    raise ValueError(f"{what} is no pickle that can be read: it has no end")


class _Machine:
    def __init__(self, make: Make, storage: Callable[[Any], Any] | None) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._make = make
        self._storage = storage

    def take(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(argument)
        elif name in _PLAIN:
            self.stack.append(_PLAIN[name])
        elif name in _NEW:
            self.stack.append(_NEW[name]())
        elif name in _LENGTHS:
            self.stack.append(tuple(self._pop(_LENGTHS[name])))
        elif name == "MARK":
            self._marks.append(len(self.stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if argument is None else argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name not in _WITHOUT_EFFECT:
            (self._container if name in _CONTAINERS else self._object)(name, argument)

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def _since_mark(self) -> list[Any]:
        return self._pop(len(self.stack) - self._marks.pop())

    def _container(self, name: str, _: Any) -> None:
        if name in ("LIST", "TUPLE", "FROZENSET"):
            items = self._since_mark()
            self.stack.append(
                items if name == "LIST" else tuple(items) if name == "TUPLE" else frozenset(items)
            )
        elif name == "DICT":
            items = self._since_mark()
            self.stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._since_mark()
            self._filled(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._since_mark()
            self._filled(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "ADDITEMS":
            items = self._since_mark()
            self._filled(set).update(items)
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        elif name == "POP":
            self._pop(1)
        else:
            self._since_mark()

    def _filled(self, kind: type) -> Any:
        """What is on top, if it may be filled like this. (A subclass of list or dict that nobody
        knows can't be.)
        """
        if not isinstance(self.stack[-1], kind):
            raise TypeError(f"{self.stack[-1]!r:.80} is filled like a {kind.__name__}")
        return self.stack[-1]

    def _object(self, name: str, argument: Any) -> None:
        if name == "GLOBAL":
            # as Python 2 said
            self.stack.append(
                Global(argument.replace(" ", ".", 1).replace("__builtin__.", "builtins."))
            )
        elif name == "STACK_GLOBAL":
            self.stack.append(Global(".".join(self._pop(2))))
        elif name in ("REDUCE", "NEWOBJ"):
            called, arguments = self._pop(2)
            self.stack.append(self._call(called, arguments))
        elif name == "NEWOBJ_EX":
            called, arguments, keywords = self._pop(3)
            self.stack.append(self._call(called, (*arguments, keywords)))
        elif name == "BUILD":
            (state,) = self._pop(1)
            if isinstance(self.stack[-1], Made):
                self.stack[-1].state = state
        elif name == "BINPERSID" and self._storage is not None:
            self.stack.append(self._storage(*self._pop(1)))
        else:
            raise ValueError(f"the operation {name}")

    def _call(self, called: Any, arguments: Any) -> Any:
        if not isinstance(called, Global | Made) or not isinstance(arguments, tuple):
            raise TypeError(f"{called!r:.80} is called")
        return (
            self._make(called.name, arguments)
            if isinstance(called, Global)
            else Made(f"{called.name}()", arguments)
        )


def write(value: Any, tensor: Callable[[Any], Made | None]) -> bytes:
    """A pickle (protocol 2) of plain values, `Global` and `Made`. `tensor` says how to make what is
    neither, None if it can't.

    Raises:
        TypeError: a value that is not among them.
    """
    out = bytearray(b"\x80\x02")
    _write(value, tensor, out)
    return bytes(out + b".")


class Persistent:
    """In what is written: the persistent id of a storage."""

    def __init__(self, identifier: tuple[Any, ...]) -> None:
        self.identifier = identifier


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
    elif type(value) in (list, tuple, dict):
        items = (
            value if type(value) is not dict else (each for item in value.items() for each in item)
        )
        opened, closed = (
            (b"](", b"e")
            if type(value) is list
            else (b"(", b"t")
            if type(value) is tuple
            else (b"}(", b"u")
        )
        out += opened
        for item in items:
            _write(item, tensor, out)
        out += closed
    elif isinstance(value, Global):
        module, _, name = value.name.rpartition(".")
        out += f"c{module}\n{name}\n".encode()
    elif isinstance(value, Persistent):
        _write(value.identifier, tensor, out)
        out += b"Q"
    elif (made := value if isinstance(value, Made) else tensor(value)) is not None:
        _write_made(made, tensor, out)
    else:
        raise TypeError(f"a {type(value).__qualname__} could only be pickled by its own class")


def _write_made(made: Made, tensor: Callable[[Any], Made | None], out: bytearray) -> None:
    _write(Global(made.name), tensor, out)
    _write(made.arguments, tensor, out)
    out += b"\x81" if made.new else b"R"
    if made.state is not None:
        _write(made.state, tensor, out)
        out += b"b"
