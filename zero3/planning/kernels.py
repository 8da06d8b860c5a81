"""What the planned device would run, where the meta device runs something else: attention, dropout,
and answers to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..comm.plain_values import name_of
from ..quantized.kernels import FourBits, Tiles
from ..quantized.sections import QuantizedTensor

__all__: list[str] = []

_ATEN = torch.ops.aten
_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_EFFICIENT_CUDA = torch.ops.aten._scaled_dot_product_efficient_attention
_FLASH, _EFFICIENT, _MATH = "flash", "memory-efficient", "math"
_ALIGNED = 8  # elements of a head that CUDA's flash attention takes; other heads are padded


class DeviceKernels(TorchFunctionMode):
    """Inside, functions of torch act on meta tensors as on `device`, "cpu" or "cuda".

    `attention` counts the kernels that were chosen, by name and why.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.attention: Counter[str] = Counter()
        on_cuda = device == "cuda"
        self._choose = _chosen_by_cuda if on_cuda else _chosen_by_cpu
        self._run = _attend_on_cuda if on_cuda else _attend_on_cpu
        self._instead: dict[Any, Callable[..., Any]] = {
            nn.functional.scaled_dot_product_attention: self._attend,
            Tensor.__bool__: _assume,
            torch._grouped_mm: _multiply_groups,
        }
        if on_cuda:
            self._instead[nn.functional.dropout] = _dropout_on_cuda
            self._instead[nn.functional.rms_norm] = _rms_norm_on_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = self._instead.get(func)
        if instead is None or not (
            isinstance(args[0] if args else None, Tensor) and args[0].is_meta
        ):
            return func(*args, **(kwargs or {}))
        return instead(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        asked = _Attention(*args, **kwargs)
        kernel, why = self._choose(asked)
        self.attention[f"{kernel} ({why})" if why else kernel] += 1
        if kernel == _MATH:
            return nn.functional.scaled_dot_product_attention(*args, **kwargs)
        mask = asked.attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=asked.query.dtype).masked_fill_(
                mask.logical_not(), float("-inf")
            )
        return self._run(kernel, asked._replace(attn_mask=mask))


def with_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation in which some tensors have values and others are on the meta device. What meets
    one without has none any more. There is one device, so nothing moves.
    """
    if func.overloadpacket is _ATEN._to_copy and kwargs.get("device") not in (None, args[0].device):
        dtype = kwargs.get("dtype") or args[0].dtype
        return _ATEN.alias(args[0]) if dtype == args[0].dtype else func(args[0], dtype=dtype)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if len({leaf.is_meta for leaf in tensors if leaf.dim()}) < 2:  # all have values, or none has
        return func(*args, **kwargs)
    if func.overloadpacket in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_):
        places = [place for index in args[1] for place in _places(index)]
        args = (args[0], places, *args[2:])
    args, kwargs = tree_map(_without_values, (tuple(args), dict(kwargs)))
    return func(*args, **kwargs)


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    """The places that are true in a mask."""
    mask = index is not None and index.dtype == torch.bool and not index.is_meta
    return index.nonzero().unbind(1) if index is not None and mask else [index]


def _without_values(leaf: Any) -> Any:
    here = isinstance(leaf, Tensor) and leaf.dim() and not leaf.is_meta
    return torch.empty_like(leaf, device="meta") if here else leaf


class FusedOnMeta:
    """In place of `quantized.fused`: an operation for each kernel, which reads and writes as many
    bytes (but for scales).
    """

    @staticmethod
    def knows(codes: torch.dtype) -> bool:
        return True

    @staticmethod
    def encode(values: Tensor, codes: Tensor, scales: Tensor, size: int, key: int | None) -> None:
        codes.copy_(values)

    @staticmethod
    def decode(codes: Tensor, scales: Tensor, out: Tensor, size: int, *, add: bool) -> None:
        out.add_(codes) if add else out.copy_(codes)

    @staticmethod
    def decode_tiles(kind: Tiles, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        out.copy_(quantized.codes[start : start + out.numel()])

    @staticmethod
    def decode_pairs(kind: FourBits, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        pairs = out.numel() // 2
        codes = quantized.codes[start // 2 : start // 2 + pairs]
        out[: 2 * pairs].view(pairs, 2).copy_(codes[:, None].expand(pairs, 2))


class _Attention(NamedTuple):
    """A call of torch's `scaled_dot_product_attention`, by its names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def backward(loss: Tensor) -> None:
    """As `loss.backward()`, which would leave the mode, and recompute checkpoints without it."""
    engine, gradient = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    engine.run_backward(
        (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """In it, optimizers with `fused=True` step on meta tensors. torch's list of devices has no
    "meta".
    """
    place = vars(import_module("torch.optim.optimizer"))
    devices = place["_get_fused_kernels_supported_devices"]
    place["_get_fused_kernels_supported_devices"] = lambda: [*devices(), "meta"]
    try:
        yield
    finally:
        place["_get_fused_kernels_supported_devices"] = devices


class _GroupedProduct(torch.autograd.Function):
    """What torch's grouped product allocates and saves. Its own, on meta, takes only what GPUs
    take: bf16 in certain strides.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        # as large as all the groups' products together, and as much work
        return torch.mm(rows, weights[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, _ = ctx.saved_tensors
        of_rows, of_weights, _ = ctx.needs_input_grad
        if of_weights:
            torch.mm(rows.t(), gradient)  # the work; the result is that of one expert
        return (
            torch.mm(gradient, weights[0].t()) if of_rows else None,
            torch.empty_like(weights) if of_weights else None,
            None,
        )


def _multiply_groups(rows: Tensor, weights: Tensor, offs: Tensor, **more: Any) -> Tensor:
    result: Tensor = _GroupedProduct.apply(rows, weights, offs)  # type: ignore[no-untyped-call]
    return result


def _assume(condition: Tensor) -> bool:
    """Models ask for values in order to leave something out: no padding, one sequence a row. Plans
    assume that they may.
    """
    return True


def _dropout_on_cuda(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """One kernel, which saves a mask of bytes. Elsewhere several operations save factors."""
    if not training or p == 0.0 or inplace:
        return nn.functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


class _RMSNorm(torch.autograd.Function):
    """What CUDA's kernel allocates and saves: its input, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, dims: int) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        ctx.save_for_backward(rows, weight, rows.new_empty(rows.shape[:-dims], dtype=wide))
        return torch.mul(rows, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, _ = ctx.saved_tensors
        return torch.mul(gradient, rows), torch.empty_like(weight), None


def _rms_norm_on_cuda(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """One kernel if the weight has the input's dtype. Elsewhere several save their results."""
    if weight is None or weight.dtype != input.dtype:
        return nn.functional.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = _RMSNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


def _chosen_by_cpu(asked: _Attention) -> tuple[str, str]:
    """Asks torch, with tensors of the same shapes that take one row of memory."""

    def like(tensor: Tensor) -> Tensor:
        row = torch.empty(tensor.shape[-1:], dtype=tensor.dtype)
        return row.requires_grad_(tensor.requires_grad).expand(tensor.shape)

    query, key, value = map(like, asked[:3])
    mask = None if asked.attn_mask is None else like(asked.attn_mask)
    choice = torch._fused_sdp_choice(
        query, key, value, mask, asked.dropout_p, asked.is_causal, enable_gqa=asked.enable_gqa
    )
    return (_MATH, "as torch chooses on the CPU") if choice == 0 else (_FLASH, "")


def _attend_on_cpu(kernel: str, asked: _Attention) -> Tensor:
    query, key, value, mask, dropout, causal, scale, _ = asked
    result: Tensor = _FLASH_CPU(query, key, value, dropout, causal, attn_mask=mask, scale=scale)[0]
    return result


def _chosen_by_cuda(asked: _Attention) -> tuple[str, str]:
    """torch's rules for GPUs since Ampere, in the order in which it tries its kernels."""
    query, key, value, mask = asked[:4]
    half = query.dtype in (torch.float16, torch.bfloat16)
    one_size = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if half and mask is None and one_size and query.shape[-1] <= 256:
        return _FLASH, ""
    name = name_of(query.dtype)
    why = "an attention mask" if mask is not None else "the heads' size" if half else name
    if asked.enable_gqa and key.shape[1] != query.shape[1]:
        return _MATH, f"{why} and grouped heads"
    if query.dtype == torch.float64 or query.shape[-1] % (_ALIGNED if half else _ALIGNED // 2):
        return _MATH, f"{name} and heads of {query.shape[-1]}"
    return _EFFICIENT, why


def _attend_on_cuda(kernel: str, asked: _Attention) -> Tensor:
    query, key, value, mask, dropout, causal, scale, _ = asked
    result: Tensor
    if kernel == _EFFICIENT:
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        needs_gradient = any(each.requires_grad for each in (query, key, value))
        result = _EFFICIENT_CUDA(
            query, key, value, mask, needs_gradient, dropout, causal, scale=scale
        )[0]
        return result
    size = query.shape[-1]
    if size % _ALIGNED:
        query, key, value = (
            nn.functional.pad(each, (0, _ALIGNED - size % _ALIGNED)) for each in (query, key, value)
        )
    scale = scale if scale is not None else size**-0.5
    result = _FLASH_CUDA(query, key, value, dropout, causal, False, scale=scale)[0]
    return result[..., :size]
