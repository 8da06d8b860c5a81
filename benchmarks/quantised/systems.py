"""Llamas whose frozen base is in four bits, under adapters, sharded by zero3 or by FSDP2 with another library's weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.counters import count_reads, send_by_sockets
from benchmarks.common.flags import Flags

RANK_OF_ADAPTERS = 16


@dataclass(frozen=True)
class Size(Flags):
    hidden: int = 1024
    intermediate: int = 2816
    layers: int = 10
    heads: int = 16
    vocabulary: int = 8192
    sequence: int = 128
    batch: int = 1

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.heads, vocab_size=self.vocabulary, dtype=torch.bfloat16, tie_word_embeddings=False,
        )  # fmt: skip

    def ids(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randint(0, self.vocabulary, (self.batch, self.sequence), generator=generator)


@dataclass
class Built:
    model: Any
    trained: list[nn.Parameter]
    read: Callable[[], int] | None = None  # bytes read from files, where they can be counted


def base(size: Size, device: str = "cpu") -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(size.config(), dtype=torch.bfloat16).requires_grad_(False)


def from_files(size: Size, directory: str) -> Any:
    """The whole model in bf16, as each of the peers begins on every rank."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).requires_grad_(False)


def adapted(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=RANK_OF_ADAPTERS, lora_alpha=RANK_OF_ADAPTERS, target_modules="all-linear")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def value_of(name: str, shape: torch.Size) -> Tensor:
    """The first value of an adapter: by its name, so that all systems begin alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * 0.02).bfloat16()


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Those that are quantised, each with the module and the name that it has there."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and name != "lm_head":
                yield module, name, child


# -- one process


def dequantised(size: Size, directory: str, kind: str) -> Built:
    """The reference: plain weights with the values that the system's codes stand for."""
    model = from_files(size, directory)
    for _, _, linear in linear_layers(model):
        linear.weight.data = _through(kind, linear.weight.data)
    return _with_values(adapted(model))


def _through(kind: str, weight: Tensor) -> Tensor:
    if kind == "torchao":
        from torchao.quantization import to_nf4

        return to_nf4(weight).get_original_weight()
    if kind == "nf4":
        import zero3

        return zero3.NF4().dequantize(zero3.NF4().quantize(weight), torch.bfloat16)
    return weight


def _with_values(model: Any) -> Built:
    trained = {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}
    for name, parameter in trained.items():
        parameter.data = value_of(name, parameter.shape)
    return Built(model, list(trained.values()))


# -- zero3


def zero3_nf4(size: Size, directory: str) -> Built:
    return _by_zero3(size, directory, quantised=True)


def zero3_nf4_by_sockets(size: Size, directory: str) -> Built:
    send_by_sockets()
    return zero3_nf4(size, directory)


def zero3_bf16_by_sockets(size: Size, directory: str) -> Built:
    send_by_sockets()
    return _by_zero3(size, directory, quantised=False)


def _by_zero3(size: Size, directory: str, quantised: bool) -> Built:
    import zero3

    read = count_reads()
    policy = zero3.ShardingPolicy(quantize=zero3.NF4() if quantised else None, param_dtype=torch.bfloat16)
    model = adapted(base(size, "meta"))
    for name, parameter in [each for each in model.named_parameters() if "lora_" in each[0]]:
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, nn.Parameter(value_of(name, parameter.shape)))
    model = zero3.shard(model, device="cpu", policy=policy)
    zero3.load_pretrained(model, directory)
    return Built(model, zero3.get_trainable_chunk(model), lambda: sum(read))


# -- FSDP2


def _fully_sharded(model: Any) -> Built:
    from torch.distributed.fsdp import fully_shard

    _with_values(model)
    inner = model.base_model.model
    for layer in [*inner.model.layers, inner.model.embed_tokens, inner.lm_head]:
        fully_shard(layer)
    fully_shard(model)
    return Built(model, [parameter for parameter in model.parameters() if parameter.requires_grad])


def _bitsandbytes(size: Size, directory: str, storage: torch.dtype) -> Built:
    import bitsandbytes

    model = from_files(size, directory)
    for owner, name, linear in list(linear_layers(model)):
        options: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": storage}
        packed = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, **options)
        packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, module=packed, **options)
        setattr(owner, name, packed.to("cpu"))  # which quantises
    return _fully_sharded(adapted(model))


def fsdp2_bitsandbytes_uint8(size: Size, directory: str) -> Built:
    return _bitsandbytes(size, directory, torch.uint8)


def fsdp2_bitsandbytes_bf16(size: Size, directory: str) -> Built:
    return _bitsandbytes(size, directory, torch.bfloat16)


def fsdp2_torchao(size: Size, directory: str) -> Built:
    """As torchtune does: every rank quantises the whole model, then FSDP2 takes its part of each weight."""
    from torchao.quantization import to_nf4

    model = from_files(size, directory)
    for _, _, linear in linear_layers(model):
        linear.weight = nn.Parameter(to_nf4(linear.weight.data), requires_grad=False)
    return _fully_sharded(adapted(model))


ZERO3 = "zero3, NF4"
ZERO3_BY_SOCKETS = "zero3, NF4, by sockets"
ZERO3_BF16 = "zero3, bf16 base, by sockets"
SYSTEMS: dict[str, tuple[Callable[[Size, str], Built], str, str]] = {  # how it is built, its reference, the package that it needs
    ZERO3: (zero3_nf4, "nf4", "zero3"),
    ZERO3_BY_SOCKETS: (zero3_nf4_by_sockets, "nf4", "zero3"),
    ZERO3_BF16: (zero3_bf16_by_sockets, "bf16", "zero3"),
    "FSDP2 + bitsandbytes, uint8": (fsdp2_bitsandbytes_uint8, "nf4", "bitsandbytes"),
    "FSDP2 + bitsandbytes, bf16": (fsdp2_bitsandbytes_bf16, "nf4", "bitsandbytes"),
    "FSDP2 + torchao NF4": (fsdp2_torchao, "torchao", "torchao"),
}


def missing(system: str) -> str:
    package = SYSTEMS[system][2]
    return "" if find_spec(package) is not None else f"{package} is not installed"


def make_checkpoint(size: Size, directory: Path) -> None:
    torch.manual_seed(0)
    base(size).save_pretrained(directory)


def bytes_at_rest(model: Any) -> tuple[int, int]:
    """The bytes that this rank keeps of quantised weights, scales and their tables included; and those of all other frozen weights."""
    storages: dict[int, int] = {}
    others, packed = 0, set[int]()
    for module in model.modules():
        if (state := getattr(module, "quant_state", None)) is not None:
            second = [state.state2.absmax, state.state2.code] if state.nested else []
            _note(storages, [state.absmax, state.code, *second, state.offset])
            packed.add(id(module.weight))
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
        if type(local).__name__ == "NF4Tensor":
            inner = [getattr(local, name) for name in ("quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4")]
            _note(storages, inner)
        elif local.dtype == torch.uint8 or id(parameter) in packed:
            _note(storages, [local])
        else:
            others += local.nbytes
    return sum(storages.values()), others


def _note(storages: dict[int, int], tensors: list[Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
