"""DeepSpeed's own way to divide sequences over ranks, under a sharded model: refused by name."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zero3
from tests.support.processes import Rank, on_ranks

CONFIG = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_an_attention_of_ulysses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed registers it: in place of the model's own."""
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for module, refused in (("deepspeed.runtime.sequence_parallel.ulysses_sp", True), ("deepspeedy", False)):

        def attend(*args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        attend.__module__ = module
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attend)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        with pytest.raises(ValueError, match=r"UlyssesSPAttentionHF.*sequence_parallel=n") if refused else contextlib.nullcontext():
            zero3.shard(model)


def test_an_attention_of_ulysses_that_comes_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zero3.shard(transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)))
    ids = torch.zeros(1, 2, dtype=torch.int64)
    model(ids)
    monkeypatch.setitem(sys.modules, "deepspeed", object())
    model(ids)

    def attend(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    attend.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attend)
    with pytest.raises(ValueError, match=r"UlyssesSPAttentionHF.*sequence_parallel=n"):
        model(ids)


def with_ulysses(rank: Rank) -> str:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank.number), "LOCAL_RANK": str(rank.number), "WORLD_SIZE": "2"}
    import deepspeed
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    TorchBackend.__init__.__globals__["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1, seq_length=8, seq_length_is_variable=False)
    try:
        zero3.shard(model)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_ulysses_of_deepspeed_itself_is_refused() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make deepspeed")
    for told in on_ranks(2, with_ulysses, fresh=True):
        assert "DeepSpeed's UlyssesSPAttentionHF" in told
