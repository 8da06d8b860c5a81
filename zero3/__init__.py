"""zero3: full sharding (ZeRO-3) of PyTorch models. Wrap layers, pass their chunks to any optimizer,
train as always.
"""

from .access import full_params, get_trainable_chunk, is_sharded, no_sync, reset, resident
from .by_hand import fetch, reduce_gradients, release, set_forward_order
from .checkpoint.full_optimizer import full_optimizer_state_dict, load_full_optimizer_state_dict
from .checkpoint.full_state import full_state_dict, load_full_state_dict
from .checkpoint.load import load_checkpoint
from .checkpoint.numbered import latest_checkpoint
from .checkpoint.save import save_checkpoint
from .diagnose.check import check
from .diagnose.profile import profile
from .diagnose.report import report
from .forward_methods import register_forward_method
from .huggingface.load_pretrained import load_pretrained
from .huggingface.merging import save_merged
from .huggingface.save_pretrained import save_pretrained
from .huggingface.stream_weights import stream_weights
from .layer import Zero3Layer
from .materialize import materialize
from .offload.activations import offload_activations
from .offload.optimizer import offload_optimizer
from .offload.parked import parked
from .optim.check_optimizer import check_optimizer
from .optim.clipping import clip_grad_norm_
from .optim.grad_scaler import GradScaler
from .optim.gradients import full_gradients, named_gradients
from .optim.norms import parameter_norms
from .optim.param_groups import param_groups
from .optim.set_trainable import set_trainable
from .optim.several import OptimizerList
from .optim.token_mean import backward
from .planning.cluster import Cluster
from .planning.plan import plan
from .policy import ParamInfo, ShardingPolicy
from .quantized.formats import MXFP4, NF4, Float8, Int8
from .resilience.batch_finder import BatchFinder
from .resilience.step_guard import step_guard
from .sequences.causal_lm import causal_lm_loss
from .sequences.head import linear_cross_entropy
from .sequences.parts import attend
from .sequences.splitting import split_sequence
from .sequences.tiles import tile
from .sequential import Zero3Sequential
from .shard import shard
from .uneven.joinable import joinable
from .zero1.optimizer import ZeroRedundancyOptimizer

__version__ = "0.1.0"  # the one place: pyproject.toml reads it

__all__ = [  # noqa: RUF022 (sorted as Python does)
    "BatchFinder",
    "Cluster",
    "Float8",
    "GradScaler",
    "Int8",
    "MXFP4",
    "NF4",
    "OptimizerList",
    "ParamInfo",
    "ShardingPolicy",
    "Zero3Layer",
    "Zero3Sequential",
    "ZeroRedundancyOptimizer",
    "attend",
    "backward",
    "causal_lm_loss",
    "check",
    "check_optimizer",
    "clip_grad_norm_",
    "fetch",
    "full_gradients",
    "full_optimizer_state_dict",
    "full_params",
    "full_state_dict",
    "get_trainable_chunk",
    "is_sharded",
    "joinable",
    "latest_checkpoint",
    "linear_cross_entropy",
    "load_checkpoint",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_pretrained",
    "materialize",
    "named_gradients",
    "no_sync",
    "offload_activations",
    "offload_optimizer",
    "param_groups",
    "parameter_norms",
    "parked",
    "plan",
    "profile",
    "reduce_gradients",
    "register_forward_method",
    "release",
    "report",
    "reset",
    "resident",
    "save_checkpoint",
    "save_merged",
    "save_pretrained",
    "set_forward_order",
    "set_trainable",
    "shard",
    "split_sequence",
    "step_guard",
    "stream_weights",
    "tile",
]
