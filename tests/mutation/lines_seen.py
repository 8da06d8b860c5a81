"""Notes which lines of the package run in which test, in every thread and process, into one file. It is copied as `sitecustomize.py`.

A process that is killed runs nothing at its end, so each line is written when a test first runs it. A line of a few bytes that is
appended is written as a whole, whichever processes write. Which test runs is a number that all processes have mapped from a file.
"""

import mmap
import os
import sys
import threading

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zero3") + os.sep
LOOKED_AT = 30  # calls of one function in one test, after which its lines are no longer traced, which takes long


def begin(folder):
    """`folder`: of the files `lines` and `number`."""
    lines = os.open(os.path.join(folder, "lines"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(os.path.join(folder, "number"), "r+b") as file:
        number = mmap.mmap(file.fileno(), 4)
    current = b""
    unseen = {}  # of this test, by code's id: the code, its lines that have not run, the calls left to look at

    def anywhere(frame, event, argument):
        nonlocal current
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        if (now := number[:4]) != current:
            current = now
            unseen.clear()
        known = unseen.get(id(code))
        if known is None:
            known = unseen[id(code)] = [code, {line for _, _, line in code.co_lines() if line}, LOOKED_AT]
        if not known[1] or not known[2]:
            return None
        known[2] -= 1
        return in_package

    def in_package(frame, event, argument):
        known = unseen.get(id(frame.f_code))
        if known is None or not known[1]:
            return None
        if event == "line" and frame.f_lineno in known[1]:
            known[1].discard(frame.f_lineno)
            test = int.from_bytes(current, "little")
            os.write(lines, f"{test} {frame.f_code.co_filename[len(PACKAGE) :]} {frame.f_lineno}\n".encode())
        return in_package

    threading.settrace(anywhere)
    sys.settrace(anywhere)


if os.environ.get("ZERO3_LINES_SEEN"):
    begin(os.environ["ZERO3_LINES_SEEN"])
