"""Whether the library that an integration is for is here, in a version that it is tested with."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

__all__: list[str] = []

# The beginnings of versions that the tests run with (requirements/lock.txt), and the extra of zero3
# that installs them.
KNOWN = MappingProxyType(
    {
        "transformers": "5.23.",
        "accelerate": "1.15.",
        "peft": "0.21.",
        "trl": "1.16.",
        "lightning": "2.6.",
    }
)


def require(library: str, caller: str) -> None:
    """Raises if `library` is not installed, and warns if its version is one that zero3 was not
    tested with.

    Raises:
        ImportError: It is not installed.
    """
    extra = library if library in ("trl", "lightning") else "transformers"
    try:
        found = version(library)
    except PackageNotFoundError:
        raise ImportError(
            f"{caller} needs {library}, which is not installed: pip install 'zero3[{extra}]'"
        ) from None
    if not f"{found}.".startswith(KNOWN[library]):
        warnings.warn(
            f"{caller} was tested with {library} {KNOWN[library]}*, and found {found}. It "
            f"replaces methods of {library} that may have changed: compare the losses of a few "
            "steps with a run without zero3 before you trust it.",
            stacklevel=3,
        )
