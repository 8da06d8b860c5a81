"""stream_weights where full buffers differ, where peft fails, of experts at home; and it leaves all of the model's state alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.huggingface.test_stream_weights import LLAMA, taken
from tests.quantized.test_merging import KINDS, lora, merged
from tests.support.adapters import same_bits
from tests.support.experts import made
from tests.support.inside import chunks_of, states_of, whole_bytes
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.support.models import Broken
from tests.support.pretrained import assert_same_bits
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.reference import Turn, on_ranks, on_two, process_group
from tests.support.stacks import loss_of, stack
from tests.support.uneven import joined_threads
from zero3 import ShardingPolicy

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


def sharded_by(**policy: Any) -> Callable[..., Any]:
    return lambda model, group, _: zero3.shard(model, process_group=group, policy=ShardingPolicy(**policy))


# -- ranks whose full buffers differ


def one_is_reset(model: Any, rank: int) -> int:
    """All of them are gathered again."""
    if rank == 0:
        zero3.reset(model)
    return -1


def one_has_changed(model: Any, rank: int) -> int:
    if rank == 1:
        states_of(model)[1].chunks[0].shard.data.add_(1)
    return 1


def all_are_reset(model: Any, rank: int) -> int:
    zero3.reset(model)
    return -1


@pytest.mark.parametrize("how", [one_is_reset, one_has_changed, all_are_reset])
def test_stream_weights_gathers_what_any_rank_has_not_or_has_changed(how: Callable[[Any, int], int]) -> None:
    """And no more: each chunk is told apart."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        chunks = chunks_of(model)
        there = [chunk for chunk in chunks if chunk.full.filled]
        assert len(there) > 3, "stage 2 keeps them"
        changed = how(model, group.rank)
        before = len(group.log)
        found = taken(zero3.stream_weights(model))
        gathered = len(chunks) if changed < 0 else len(chunks) - len(there) + changed
        assert [each.kind for each in group.log[before:]] == ["exchange"] + ["all_gather"] * gathered
        expected = zero3.full_state_dict(model, rank0_only=False)
        assert_same_bits(found, dict(sorted(expected.items())))
        loss_of(model, Turn(group.rank, 0, 2)).backward()

    on_ranks(2, stack, body, sharded_by(stage=2))


# -- adapters


def test_a_merge_that_fails_changes_nothing_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters are active, and the second fails on one rank: the others get everything, and the next stream is right."""

    def build() -> Any:
        model = lora(target_modules=["q_proj", "down_proj"], use_dora=True)
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
        return model

    class Delta(peft.tuners.lora.Linear):
        asked = 0

        def get_delta_weight(self, adapter: str) -> Tensor:
            Delta.asked += adapter == "second"
            if Delta.asked > 1:  # the first time is at the call, where all ranks would hear of it
                raise Broken("no room for the product")
            return super().get_delta_weight(adapter)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        whole = build()
        state = {name: value.clone() for name, value in whole.state_dict().items()}
        models = [build() for _ in range(2)]
    for model in models:
        model.load_state_dict(state)
    expected = merged(whole)

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        before = [p.detach().clone() for p in model.parameters()]
        first = model.base_model.model.model.layers[0].self_attn.q_proj
        kind = type(first)
        if group.rank == 1:
            first.__class__ = Delta
            with pytest.raises(Broken, match="no room for the product"):
                taken(zero3.stream_weights(model, merge_adapters=True))
            first.__class__ = kind
        else:
            assert_same_bits(taken(zero3.stream_weights(model, merge_adapters=True)), dict(sorted(expected.items())))
        assert not any(module.merged_adapters for module in model.modules() if hasattr(module, "merged_adapters"))
        assert not any(vars(module).get("_caches") for module in model.modules())
        assert same_bits([p.detach() for p in model.parameters()], before)
        assert_same_bits(taken(zero3.stream_weights(model, merge_adapters=True)), dict(sorted(expected.items())))

    run_ranks(2, body)


def prompts() -> Any:
    with torch.random.fork_rng(devices=[]):
        return peft.get_peft_model(LLAMA.build(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def poly() -> Any:
    """Its layers have peft's own `merge`, which raises."""
    with torch.random.fork_rng(devices=[]):
        return peft.get_peft_model(LLAMA.build(), peft.PolyConfig(r=2, n_tasks=1, n_skills=2, n_splits=1, target_modules=["q_proj"]))


@pytest.mark.parametrize(("build", "text"), [(prompts, "of the kind PROMPT_TUNING can't be merged"), (poly, "it has no merge")])
def test_adapters_without_a_merge_are_refused_at_the_call_and_no_base_is_passed_off_for_them(
    build: Callable[[], Any], text: str, tmp_path: Path
) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=text):
            zero3.stream_weights(model, merge_adapters=True)
        with pytest.raises(ValueError, match=text):
            zero3.save_merged(model, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
        assert taken(zero3.stream_weights(model, adapters_only=True))

    on_two(build, body)


@pytest.mark.parametrize("quantize", [zero3.NF4(), None], ids=["nf4", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merged_adapters_are_cast_behind_the_merge(dtype: torch.dtype, quantize: Any) -> None:
    expected = {name: value.to(dtype) for name, value in merged(lora(**KINDS["plain"]), quantize).items()}

    def body(model: Any, group: ThreadCommunicator) -> None:
        assert_same_bits(taken(zero3.stream_weights(model, merge_adapters=True, dtype=dtype)), dict(sorted(expected.items())))

    on_ranks(2, lambda: lora(**KINDS["plain"]), body, sharded_by(quantize=quantize))


# -- bytes


def peak(model: Any, **options: Any) -> int:
    """Of the bytes that a stream takes beside the chunks."""
    with LiveBytes() as live:
        live.left_out = {chunk.untyped_storage().data_ptr() for chunk in model.parameters()}
        found = live.peak_of(lambda: [None for _ in zero3.stream_weights(model, **options)])
    assert live.now < 64  # numbers of peft
    return found


@pytest.mark.parametrize("depth", [0, 1])
def test_experts_are_gathered_one_parameter_at_a_time(depth: int) -> None:
    """So the largest parameter of experts is whole beside one or two other layers, and never two of them. Each chunk once."""
    with torch.random.fork_rng(devices=[]):
        models = [made(experts=8) for _ in range(3)]
    model = zero3.shard(models[0], process_group=LonelyCommunicator(2), policy=ShardingPolicy(prefetch_depth=depth, expert_parallel=True))
    chunks = chunks_of(model)
    at_home = sorted(chunk.layout.padded_numel * chunk.shard.element_size() for chunk in chunks if chunk.in_part)
    others = max(
        sum(chunk.layout.padded_numel * chunk.shard.element_size() for chunk in state.chunks if not chunk.in_part)
        for state in states_of(model)
    )
    limit = at_home[-1] + (1 + depth) * others + 64 * len(chunks)  # what is yielded lies there
    assert limit < at_home[-1] + at_home[-2], "two of them would not fit"
    assert peak(model) <= limit

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[1 + group.rank], process_group=process_group(group), policy=ShardingPolicy(expert_parallel=True))
        before = len(group.log)
        found = taken(zero3.stream_weights(model))
        gathers = [each.numel for each in group.log[before:] if each.kind == "all_gather"]
        assert sorted(gathers) == sorted(c.layout.padded_numel for c in chunks_of(model))
        assert_same_bits(found, dict(sorted(zero3.full_state_dict(model, rank0_only=False).items())))

    run_ranks(2, body)


@pytest.mark.parametrize("quantize", [zero3.NF4(), None], ids=["nf4", "none"])
def test_a_stream_that_merges_or_dequantises_holds_two_layers_the_adapters_and_what_it_yields(quantize: Any) -> None:
    plain = lora(**KINDS["plain"])
    largest = max(parameter.numel() for parameter in plain.parameters()) * 4
    model = zero3.shard(plain, process_group=LonelyCommunicator(2), policy=ShardingPolicy(quantize=quantize))
    chunks = chunks_of(model)
    adapters = sum(chunk.layout.padded_numel * chunk.shard.element_size() for chunk in chunks if chunk.trains)
    layers = max(whole_bytes(model).values())
    # peft's product in float32 and in the weight's dtype, and a copy of what can't be written where it is read
    assert peak(model, merge_adapters=True) <= 2 * layers + adapters + 4 * largest


# -- what is left alone


def test_stream_weights_leaves_all_state_of_the_model_alone() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        LLAMA.loss(model, Turn(0, 0, 1))
        optimizer.step()
        model.eval()
        model.base_model.model.model.layers[0].train()

        def state() -> list[Any]:
            return [
                [(p, p.grad, p.requires_grad, p._version) for p in model.parameters()],
                [module.training for module in model.modules()],
                [(name, id(tensor)) for name, tensor in model.named_buffers()],
                [list(module.merged_adapters) for module in model.modules() if hasattr(module, "merged_adapters")],
                list(model.active_adapters),
                [[(k, id(v)) for k, v in each.items()] for each in optimizer.state.values()],
            ]

        before, values = state(), [p.detach().clone() for p in model.parameters()]
        gradients = [p.grad.as_subclass(Tensor).clone() for p in zero3.get_trainable_chunk(model)]
        drawn = torch.get_rng_state()
        for options in ({"merge_adapters": True}, {"adapters_only": True}):
            taken(zero3.stream_weights(model, **options))
        now = state()
        assert all(a is b and c is d and e == f and g == h for (a, c, e, g), (b, d, f, h) in zip(before[0], now[0], strict=True))
        assert before[1:] == now[1:]
        assert torch.equal(drawn, torch.get_rng_state())
        assert same_bits([p.detach() for p in model.parameters()], values)
        assert same_bits([p.grad.as_subclass(Tensor) for p in zero3.get_trainable_chunk(model)], gradients)

    on_ranks(2, lambda: lora(**KINDS["plain"]), body, sharded_by())  # no rank draws, so all see one generator


def test_stream_weights_under_param_groups_with_whole_parameters() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.SGD(zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2}), lr=0.1)
        for step in range(2):
            loss_of(model, Turn(group.rank, step, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            found = taken(zero3.stream_weights(model))
            assert_same_bits(found, dict(sorted(zero3.full_state_dict(model, rank0_only=False).items())))

    on_two(stack, body)


@pytest.mark.parametrize("when", ["before the step", "in the step"])
def test_a_rank_that_holds_stream_weights_inside_joinable_finishes_it_before_join_counts(when: str) -> None:
    """Also if its step uses the model no more."""
    models = [stack(), stack()]

    def body(group: Any) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        held: list[Any] = []

        def stream() -> None:
            held.append(zero3.stream_weights(model))
            next(held[-1]) if group.rank else taken(held[-1])

        with joined_threads(group, model, stream if when == "in the step" else lambda: None) as uneven:
            for step in range(2):
                loss_of(model, Turn(group.rank, step, 2)).backward()
                if when == "before the step":
                    stream()
                uneven.step()
                if group.rank:
                    with pytest.raises(RuntimeError, match="on this rank the model begins joinable"):
                        next(held[-1])

    run_ranks(2, body)


@pytest.mark.parametrize("mesh", [False, True], ids=["group", "mesh"])
def test_stream_weights_inside_joinable(mesh: bool) -> None:
    """While all ranks have data: in the group of shards alone, on a mesh too."""
    count = 4 if mesh else 2
    models = [stack() for _ in range(count)]

    def body(group: Any) -> None:
        model = zero3.shard(models[group.rank], process_group=group if mesh else process_group(group))
        streams = not mesh or group.replica == 1
        with joined_threads(group, model, lambda: None, by_all=True):
            for step in range(2):
                loss_of(model, Turn(group.rank, step, count)).backward()
                if streams:
                    assert len(taken(zero3.stream_weights(model))) > 5

    if mesh:
        run_mesh(2, 2, body)
    else:
        run_ranks(2, body)
