"""`python -m zero3`: shows checkpoints, converts them to other formats, and plans. Each subcommand
is a file in `commands/`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__
from .commands import convert, export, hang, inspect, plan

__all__: list[str] = []

_COMMANDS = (inspect, export, convert, plan, hang)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. 0: done. 1: failed, with the reason on stderr. 2: the command line is
    wrong. `plan` has codes of its own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m zero3",
        description=(
            "Sharded checkpoints, looked into, exported and converted; plans. One process, no GPU."
        ),
    )
    parser.add_argument("--version", action="version", version=f"zero3 {__version__}")
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        subparser = subcommands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads wants no more, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 141
    except (OSError, ValueError) as error:
        print(f"zero3: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
