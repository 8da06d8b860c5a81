"""The largest batch of a plan trains in processes that may take no more memory than the plan was given; one sequence more does not."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import zero3
from tests.support.processes import Rank, on_ranks

SEQUENCE, WORDS = 256, 2048
NOT_TENSORS = 4 * 10**6  # bytes for Python's objects and the C library's own; a sequence takes eight times as much here
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of <malloc.h>


def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=WORDS, intermediate_size=688, tie_word_embeddings=False
    )


def trains_in(rank: Rank, memory: int, batch: int) -> str:
    """Makes a step, with a limit of the system's on this process's memory. Returns what failed, or nothing.

    Every tensor of some size is a mapping of its own here, which is gone when the tensor is: the heap keeps nothing back.
    """
    library = ctypes.CDLL(None)
    library.mallopt(_M_ARENA_MAX, 1)
    library.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    model = AutoModelForCausalLM.from_config(config())
    model.train()
    zero3.shard(model)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))

    def step(sequences: int) -> None:
        ids = torch.zeros(sequences, SEQUENCE, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    gc.collect()
    chunks = zero3.get_trainable_chunk(model)
    held = sum(chunk.nbytes + sum(state.nbytes for state in optimizer.state[chunk].values()) for chunk in chunks)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data() - held + memory + NOT_TENSORS, before[1]))
    try:
        step(batch)
    except (RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return ""


def _data() -> int:
    """The bytes that the limit counts: this process's private memory that can be written."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return 1024 * int(line.split()[1])


@pytest.mark.slow
def test_largest_batch_fits_a_capped_process_and_one_more_does_not() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    plan = zero3.plan(model, ranks=2, batch=1, sequence=SEQUENCE, memory=120_000_000, device="cpu")
    assert plan.fits and plan.largest_batch is not None and plan.largest_batch > 1
    assert on_ranks(2, trains_in, 120_000_000, plan.largest_batch, fresh=True) == ["", ""]
    assert all("memory" in failed for failed in on_ranks(2, trains_in, 120_000_000, plan.largest_batch + 1, fresh=True))
