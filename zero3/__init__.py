"""zero3: full sharding (ZeRO-3) of PyTorch models. Wrap layers, pass their chunks to any optimizer, train as always."""

from .access import full_params, get_trainable_chunk, no_sync, reset, resident
from .check import check
from .checkpoint.full_state import full_state_dict, load_full_state_dict
from .checkpoint.pretrained import load_pretrained
from .layer import Zero3Layer
from .optim.clip import clip_grad_norm_
from .optim.token_mean import backward
from .policy import ShardingPolicy
from .report import report
from .sequential import Zero3Sequential
from .shard import shard
from .step_guard import step_guard

__all__ = [
    "ShardingPolicy",
    "Zero3Layer",
    "Zero3Sequential",
    "backward",
    "check",
    "clip_grad_norm_",
    "full_params",
    "full_state_dict",
    "get_trainable_chunk",
    "load_full_state_dict",
    "load_pretrained",
    "no_sync",
    "report",
    "reset",
    "resident",
    "shard",
    "step_guard",
]
