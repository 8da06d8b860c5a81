"""zero3: full sharding (ZeRO-3) of PyTorch models. Wrap layers, pass their chunks to any optimizer, train as always."""

from .access import full_params, get_trainable_chunk, no_sync, reset, resident
from .check import check
from .checkpoint.full_optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from .checkpoint.full_state import full_state_dict, load_full_state_dict
from .checkpoint.loading import load_checkpoint
from .checkpoint.numbered import latest_checkpoint
from .checkpoint.pretrained import load_pretrained
from .checkpoint.save_pretrained import save_pretrained
from .checkpoint.saving import save_checkpoint
from .joining import joinable
from .layer import Zero3Layer
from .optim.check import check_optimizer
from .optim.clip import clip_grad_norm_
from .optim.groups import ParamInfo, param_groups
from .optim.norms import parameter_norms
from .optim.scaler import GradScaler
from .optim.token_mean import backward
from .optim.zero_redundancy import ZeroRedundancyOptimizer
from .policy import ShardingPolicy
from .profiler import profile
from .report import report
from .sequential import Zero3Sequential
from .shard import shard
from .step_guard import step_guard

__all__ = [
    "GradScaler",
    "ParamInfo",
    "ShardingPolicy",
    "Zero3Layer",
    "Zero3Sequential",
    "ZeroRedundancyOptimizer",
    "backward",
    "check",
    "check_optimizer",
    "clip_grad_norm_",
    "full_optimizer_state_dict",
    "full_params",
    "full_state_dict",
    "get_trainable_chunk",
    "joinable",
    "latest_checkpoint",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_pretrained",
    "no_sync",
    "param_groups",
    "parameter_norms",
    "profile",
    "report",
    "reset",
    "resident",
    "save_checkpoint",
    "save_pretrained",
    "shard",
    "step_guard",
]
