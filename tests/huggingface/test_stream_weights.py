"""stream_weights: the tensors of a model's files, without files: names, bits, bytes, gathers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.huggingface.test_save_pretrained import contents
from tests.quantized.test_merging import KINDS, lora, merged
from tests.support.adapters import adapted, same_bits
from tests.support.architectures import ARCHITECTURES
from tests.support.inside import chunks_of, states_of
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.support.models import WORLDS
from tests.support.pretrained import assert_same_bits
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.reference import Turn, on_ranks, on_two, process_group
from tests.support.stacks import built, loss_of, stack
from zero3 import ShardingPolicy
from zero3.huggingface.stream_weights import _buckets, walk_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

LLAMA = ARCHITECTURES["Llama"]


def taken(stream: Any) -> dict[str, Tensor]:
    """Sorted copies of what is yielded, one by one or in buckets."""
    found: dict[str, Tensor] = {}
    for item in stream:
        for name, tensor in item if isinstance(item, list) else [item]:
            assert tensor.is_contiguous() and not tensor.requires_grad and name not in found
            found[name] = tensor.clone()
    return dict(sorted(found.items()))


# -- names and bits


@WORLDS
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Mixtral", "T5"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_stream_weights_yields_what_transformers_writes(name: str, dtype: Any, world_size: int, tmp_path: Path) -> None:
    """Ties, experts one by one, transposed matrices; as single tensors and in buckets."""
    plain, *models = [ARCHITECTURES[name].build() for _ in range(world_size + 1)]
    (plain if dtype is None else plain.to(dtype)).save_pretrained(tmp_path)
    expected = contents(tmp_path)

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        assert_same_bits(taken(zero3.stream_weights(model, dtype=dtype)), expected)
        assert_same_bits(taken(zero3.stream_weights(model, dtype=dtype, max_bytes=3000)), expected)

    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", [zero3.NF4(), None], ids=["nf4", "none"])
def test_stream_weights_with_merge_adapters_is_what_peft_merges(quantize: Any, kind: str, world_size: int) -> None:
    expected = merged(lora(**KINDS[kind]), quantize)
    models = [lora(**KINDS[kind]) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        policy = ShardingPolicy(quantize=quantize, group_adapters=world_size != 3, stage=2 if world_size == 2 else 3)
        model = zero3.shard(models[group.rank], process_group=process_group(group), policy=policy)
        LLAMA.loss(model, Turn(0, 0, 1))  # what stays is there now
        before = [chunk.detach().clone() for chunk in model.parameters()]
        versions = [state.parameters.versions for state in states_of(model)]
        found = taken(zero3.stream_weights(model, merge_adapters=True))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert same_bits([chunk.detach() for chunk in model.parameters()], before)
        assert versions == [state.parameters.versions for state in states_of(model)]
        noted = [(module.merged_adapters, vars(module).get("_caches")) for module in model.modules() if hasattr(module, "merged_adapters")]
        assert noted and not any(merged or caches for merged, caches in noted)
        LLAMA.loss(model, Turn(0, 0, 1))

    run_ranks(world_size, body)


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_stream_weights_with_adapters_only_is_the_adapters_file(kind: str, dtype: Any, tmp_path: Path) -> None:
    def build() -> Any:
        return lora(**KINDS[kind])

    build().save_pretrained(tmp_path)
    expected = contents(tmp_path)
    expected = {name: value if dtype is None else value.to(dtype) for name, value in expected.items()}

    def body(model: Any, group: ThreadCommunicator) -> None:
        before = len(group.log)
        found = taken(zero3.stream_weights(model, adapters_only=True, dtype=dtype))
        assert_same_bits(found, expected)
        gathered = [each.numel for each in group.log[before:] if each.kind == "all_gather"]
        trained = [chunk for chunk in chunks_of(model) if chunk.trains]
        assert gathered == [chunk.layout.padded_numel for chunk in trained], "the adapters' chunk, and no other"

    on_two(build, body)


def test_stream_weights_with_adapters_only_of_a_prompt_encoder(tmp_path: Path) -> None:
    def build() -> Any:
        torch.manual_seed(3)
        config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
        return peft.get_peft_model(LLAMA.build(), config)

    build().save_pretrained(tmp_path)
    on_two(build, lambda model, group: assert_same_bits(taken(zero3.stream_weights(model, adapters_only=True)), contents(tmp_path)))


@pytest.mark.parametrize(
    "policy",
    [
        {"offload": "cpu"}, {"offload": "DIR"}, {"stage": 1}, {"stage": 2}, {"gather_format": zero3.Int8()}, {"prefetch_depth": 0},
        {"param_dtype": torch.bfloat16}, {"quantize": zero3.Int8()}, {"compare_every": 1},
    ],
    ids=str,
)  # fmt: skip
def test_stream_weights_yields_masters_whatever_the_policy(policy: dict[str, Any], tmp_path: Path) -> None:
    """Between micro-batches, under no_sync, with gradients that wait. Training goes on as without it."""
    options = {**policy, "offload": tmp_path} if policy.get("offload") == "DIR" else policy
    build = adapted if "quantize" in policy else stack
    ends = []

    def shard(model: Any, group: Any, _: ShardingPolicy) -> Any:
        return zero3.shard(model, process_group=group, policy=ShardingPolicy(**options))

    for streams in (False, True):

        def body(model: Any, group: ThreadCommunicator) -> list[Tensor]:
            optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
            for step in range(2):
                with zero3.no_sync(model):
                    loss_of(model, Turn(group.rank, 2 * step, 2)).backward()
                if streams:  # noqa: B023
                    with torch.inference_mode(), zero3.no_sync(model):
                        found = taken(zero3.stream_weights(model, max_bytes=500))
                    expected = zero3.full_state_dict(model, rank0_only=False)
                    assert_same_bits(found, dict(sorted(expected.items())))
                loss_of(model, Turn(group.rank, 2 * step + 1, 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return list(zero3.full_state_dict(model, rank0_only=False).values())

        ends.append(on_ranks(2, build, body, shard))
    assert all(same_bits(one, other) for one, other in zip(*ends, strict=True))


# -- gathers and bytes


def gathered_in(dtype: Any, chunk: Any) -> Any:
    return chunk.shard.dtype if dtype is None or dtype.itemsize > chunk.shard.element_size() else dtype


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("policy", [{}, {"stage": 2}, {"resident_bytes": 10**6}, {"stage": 2, "param_dtype": torch.bfloat16}], ids=str)
def test_stream_weights_gathers_each_chunk_once_unless_it_is_there(policy: dict[str, Any], dtype: Any) -> None:
    """In the dtype that is asked for, if that has no more bytes: so it is there already where layers compute in it."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        chunks = chunks_of(model)
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        log = states_of(model)[0].log
        for steps in (False, True):
            there = [c for c in chunks if c.full.filled and c.full.tensor.dtype == gathered_in(dtype, c)]
            stale = steps and chunks[0] in there
            before, logged = len(group.log), log.count
            found = taken(zero3.stream_weights(model, dtype=dtype))
            made = [(each.kind, each.dtype) for each in group.log[before:]]
            travel = [c for c in chunks if c not in there or (stale and c is chunks[0])]
            assert made[0][0] == "exchange"
            assert sorted(map(str, made[1:])) == sorted(str(("all_gather", gathered_in(dtype, c))) for c in travel)
            assert log.count == logged, "no other replica makes these gathers"
            expected = {k: v.to(dtype or v.dtype) for k, v in zero3.full_state_dict(model, rank0_only=False).items()}
            assert_same_bits(found, dict(sorted(expected.items())))
            loss_of(model, Turn(group.rank, 0, 2)).backward()
            if group.rank == 1:  # all ranks have to gather what one has changed
                chunks[0].shard.data.add_(1)

    on_ranks(2, adapted, body, lambda model, group, _: zero3.shard(model, process_group=group, policy=ShardingPolicy(**policy)))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("max_bytes", [None, 1, 3000])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_stream_weights_holds_two_layers_and_what_it_yields(depth: int, max_bytes: Any, dtype: Any) -> None:
    model = zero3.shard(stack(5), process_group=LonelyCommunicator(3), policy=ShardingPolicy(prefetch_depth=depth))
    layers = zero3.report(model).largest_layer_bytes
    tensors = walk_of(model, dtype, []).outputs
    with LiveBytes() as live:
        live.left_out = {chunk.untyped_storage().data_ptr() for chunk in model.parameters()}

        def body() -> None:
            for _ in zero3.stream_weights(model, dtype=dtype, max_bytes=max_bytes):
                pass

        peak = live.peak_of(body)
    room = max(max(o.nbytes for o in tensors), max_bytes or 0) + 16 * len(tensors)  # each begins at a multiple of 16
    assert peak <= layers * (2 if depth else 1) + room
    assert live.now == 0


def test_stream_weights_in_buckets_of_at_most_max_bytes() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        largest = max(o.nbytes for o in walk_of(model, None, []).outputs)
        single = list(taken(zero3.stream_weights(model)))
        for max_bytes in (1, 200, largest, 10**9):
            names, sizes = [], []
            for bucket in zero3.stream_weights(model, max_bytes=max_bytes):
                sizes.append((sum(tensor.nbytes for _, tensor in bucket), len(bucket)))
                names += [name for name, _ in bucket]
            assert all(nbytes <= max_bytes or count == 1 for nbytes, count in sizes)
            assert all(count for _, count in sizes) and sorted(names) == single
            assert (len(sizes) == 1) == (max_bytes == 10**9)

    on_two(stack, body)


def test_buckets_copy_only_what_earlier_layers_hold() -> None:
    """What a bucket has of its last layer stays where it was read; so do single tensors."""
    model = zero3.shard(stack(5), process_group=LonelyCommunicator(3))
    walk = walk_of(model, None, [])
    names = [output.name for output in walk.outputs]
    assert walk.in_place([[output] for output in walk.outputs]) == set(names)
    last = walk.in_place([walk.outputs])
    assert names[-1] in last and 0 < len(last) < len(names)
    assert walk.in_place([walk.outputs[-len(last) :]]) == last


def test_buckets_are_full_or_end_with_a_layer() -> None:
    def sizes(layers: list[list[int]], max_bytes: int | None) -> list[list[int]]:
        given = [[SimpleNamespace(nbytes=n) for n in layer] for layer in layers]
        return [[o.nbytes for o in bucket] for bucket in _buckets(given, max_bytes)]

    assert sizes([[3, 0, 4, 9, 1, 2]], 7) == [[3, 0, 4], [9], [1, 2]]
    assert sizes([[3, 0], [4, 9], [1, 2]], 7) == [[3, 0, 4], [9], [1, 2]], "three of seven is not half full"
    assert sizes([[3, 0], [4, 9], [1, 2]], 5) == [[3, 0], [4], [9], [1, 2]]
    assert sizes([[4, 4], [0, 4], [4, 4]], 16) == [[4, 4, 0, 4], [4, 4]]
    assert sizes([[4, 4], [0, 4], [4, 4]], 12) == [[4, 4], [0, 4, 4, 4]]
    assert sizes([[3, 0, 4], [9, 1, 2]], None) == [[n] for n in (3, 0, 4, 9, 1, 2)]
    assert sizes([], 7) == []


def test_writing_into_what_stream_weights_yields_changes_nothing_of_the_model() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        before = zero3.full_state_dict(model, rank0_only=False)
        for options in ({}, {"max_bytes": 900}, {"dtype": torch.bfloat16, "max_bytes": 900}):
            for items in zero3.stream_weights(model, **options):
                for _, tensor in items if "max_bytes" in options else [items]:
                    tensor.fill_(7)
            assert_same_bits(zero3.full_state_dict(model, rank0_only=False), before)
            loss_of(model, Turn(group.rank, 0, 2)).backward()  # which leaves full buffers, at stage 2

    for world_size in (1, 2):
        for stage in (2, 3):
            on_ranks(world_size, stack, body, lambda m, g, _: zero3.shard(m, process_group=g, policy=ShardingPolicy(stage=stage)))  # noqa: B023


# -- meshes, buffers


def with_buffer(value: float) -> Any:
    model = stack()
    model.register_buffer("mean", torch.full((3,), value))
    return model


@pytest.mark.parametrize("alone", [True, False])
def test_one_replica_may_stream_weights_while_the_other_goes_on(alone: bool) -> None:
    """And buffers have the values of the first rank of the group that shares shards."""
    models = [with_buffer(0.0) for _ in range(4)]

    def body(mesh: Any) -> list[Tensor]:
        model = zero3.shard(models[mesh.rank], process_group=mesh, policy=ShardingPolicy(compare_every=1))
        model.mean.fill_(mesh.rank)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(2):
            if not alone or mesh.replica == 1:
                found = taken(zero3.stream_weights(model))
                assert found["mean"].tolist() == [2.0 * mesh.replica] * 3
            loss_of(model, Turn(mesh.rank, step, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.mean.tolist() == [float(mesh.rank)] * 3, "a rank's own buffers stay"
        return [value for name, value in zero3.full_state_dict(model, rank0_only=False).items() if name != "mean"]

    found = run_mesh(2, 2, body)
    assert all(same_bits(each, found[0]) for each in found)


# -- refusals


def adapted_by_two() -> Any:
    model = lora(target_modules=["q_proj"])
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no choice": (lambda: lora(target_modules=["q_proj"]), {}, ValueError, "choose merge_adapters=True"),
    "both": (lambda: lora(target_modules=["q_proj"]), {"merge_adapters": True, "adapters_only": True}, ValueError, "choose one"),
    "merge without adapters": (stack, {"merge_adapters": True}, ValueError, "merge_adapters=True. of a model without adapters"),
    "only without adapters": (stack, {"adapters_only": True}, ValueError, "adapters_only=True. of a model without adapters"),
    "several adapters": (adapted_by_two, {"adapters_only": True}, ValueError, r"2 adapters are active \(default, second\)"),
    "max_bytes 0": (stack, {"max_bytes": 0}, ValueError, "max_bytes must be at least 1, found 0"),
    "max_bytes True": (stack, {"max_bytes": True}, TypeError, "max_bytes must be a number of bytes"),
    "dtype": (stack, {"dtype": "bf16"}, TypeError, "dtype must be a torch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stream_weights_refuses_by_name_on_all_ranks_at_the_call(name: str) -> None:
    build, options, error, text = REFUSED[name]

    def body(model: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(error, match=text):
            zero3.stream_weights(model, **options)

    on_two(build, body)


def test_ranks_that_ask_stream_weights_for_different_things_raise_together() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"ranks differ in stream_weights.*None, False, False, 100"):
            zero3.stream_weights(model, max_bytes=100 + group.rank)
        with pytest.raises(ValueError, match="rank 1: max_bytes must be at least 1"):
            zero3.stream_weights(model, max_bytes=1 - group.rank)

    on_two(stack, body)


def test_merged_adapters_are_refused_and_taken_back_they_stream() -> None:
    model = zero3.shard(lora(target_modules=["q_proj"]))
    with zero3.resident(model):
        model.merge_adapter()
    with pytest.raises(ValueError, match="merged into the model already"):
        zero3.stream_weights(model, merge_adapters=True)


def test_stream_weights_of_a_model_without_values_names_them() -> None:
    with torch.device("meta"):
        model = built(stack)
    model = zero3.shard(model, device="cpu")
    with pytest.raises(RuntimeError, match=r"have no values yet"):
        zero3.stream_weights(model)
