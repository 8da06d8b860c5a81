"""Runs the trials of one class on ranks that are processes of their own: a crash or a hang ends that check alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import transformers

from .tiny import model_types
from .trial import CHECKS, Subject, outcome

_CONTEXT = multiprocessing.get_context("fork")  # so that a rank need not import transformers again
_LAGGARD = 20.0  # seconds that a rank gets when another has answered


def try_class(kind: str, ranks: int, timeout: float, checks: Sequence[str] = tuple(CHECKS)) -> dict[str, str]:
    """What came of each check: `ok`, `-` (the class has no such thing), or a text."""
    with contextlib.suppress(Exception):
        getattr(transformers, model_types()[kind][1])  # imported once, not by every rank
    found: dict[str, str] = {}
    while left := [check for check in checks if check not in found]:
        with tempfile.TemporaryDirectory() as folder:
            found |= _on_fresh_ranks(kind, ranks, timeout, left, folder)
        if "build" in found:
            break
    return found


def _on_fresh_ranks(kind: str, ranks: int, timeout: float, checks: list[str], folder: str) -> dict[str, str]:
    """The results up to the first that is not good: what comes after it begins with fresh processes."""
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = _CONTEXT.Pipe()
        processes.append(_CONTEXT.Process(target=_serve, args=(theirs, rank, ranks, folder, kind, checks), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    found: dict[str, str] = {}
    try:
        for check in ["build", *checks]:
            answers = _answers(pipes, timeout)
            bad = [answer for answer in answers if answer not in ("ok", "-")]
            if check != "build" or bad:
                found[check] = min(bad, key=lambda text: text.startswith(("hangs", "died"))) if bad else answers[0]
            if bad:
                break
            for pipe in pipes:
                pipe.send(True)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _answers(pipes: list[Connection], timeout: float) -> list[str]:
    answers, deadline = [""] * len(pipes), time.monotonic() + timeout
    while "" in answers and time.monotonic() < deadline:
        for rank, pipe in enumerate(pipes):
            if not answers[rank] and pipe.poll(0.05):
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = "died"
                deadline = min(deadline, time.monotonic() + _LAGGARD)
    return [answer or f"hangs for {timeout:.0f} s" for answer in answers]


def _serve(pipe: Any, rank: int, ranks: int, folder: str, kind: str, checks: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    tempfile.tempdir = folder
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what models warn of is not the sweep's progress
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        subject = Subject(kind)
    except Exception as error:
        pipe.send(f"no model: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return
    pipe.send("ok")
    for check in checks:
        pipe.recv()
        pipe.send(outcome(subject, check))
    pipe.recv()
