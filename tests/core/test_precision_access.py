"""Mixed precision seen from outside a step: values are those that are stored, and what tells of them names their dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.core.test_precision import BF16, FP32, batch, blocks, in_layers, loss_of
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy, Zero3Layer


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_params_writeback_and_full_state_dict_show_what_is_stored(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        policy = ShardingPolicy(param_dtype=BF16)
        model = in_layers(fresh[group.rank], group if world_size > 1 else None, policy)
        output = model(batch(0, 0))  # buffers are in use
        with zero3.full_params(model, writeback=True):
            for name, parameter in model.named_parameters():
                assert parameter.dtype == FP32
                assert torch.equal(parameter, plain[name])
                parameter.data.mul_(1.001)  # lost in bf16
            with pytest.raises(RuntimeError, match=r"param_dtype=torch\.bfloat16\. Use `with zero3\.resident"):
                model(batch(0, 0))
            with pytest.raises(RuntimeError, match="leave one before"), zero3.resident(model):
                pass
        with zero3.resident(model):
            assert {p.dtype for p in model.parameters()} == {BF16}
            with pytest.raises(RuntimeError, match="leave one before"), zero3.full_params(model):
                pass
            inside = model(batch(1, 0)).detach()
        assert torch.equal(inside, model(batch(1, 0)).detach())
        saved = zero3.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(saved[name], value * 1.001) for name, value in plain.items())
        zero3.load_full_state_dict(model, plain)
        assert torch.equal(model(batch(0, 0)), output)
        loss_of(model(batch(0, 0))).backward()
        assert all(p.grad is not None and p.grad.dtype == FP32 for p in model.get_trainable_chunk())

    plain = {name: value.detach().clone() for name, value in blocks().named_parameters()}
    fresh = [blocks() for _ in range(world_size)]
    run_ranks(world_size, body)


def test_a_graph_from_before_full_params_still_has_its_weights() -> None:
    def body(group: ThreadCommunicator, look: bool) -> list[Tensor]:
        model = in_layers(blocks(), group, ShardingPolicy(param_dtype=BF16))
        loss = loss_of(model(batch(0, group.rank)))
        if look:
            with zero3.full_params(model):
                pass
        loss.backward()
        return [chunk.grad.clone() for chunk in model.get_trainable_chunk() if chunk.grad is not None]

    torch.manual_seed(0)
    with torch.random.fork_rng():
        undisturbed = run_ranks(1, lambda group: body(group, False))
        disturbed = run_ranks(1, lambda group: body(group, True))
    assert len(undisturbed[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(disturbed[0], undisturbed[0], strict=True))


# -- what is told


def test_model_dtype_is_that_of_the_master_copy() -> None:
    policy = ShardingPolicy(param_dtype=BF16)
    model = in_layers(blocks(), None, policy)
    assert model.dtype == model[0].dtype == FP32
    assert "param_dtype=torch.bfloat16" in repr(policy)
    assert Zero3Layer(nn.ReLU()).dtype == torch.get_default_dtype()


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_dtypes_that_can_not_be_computed_in_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a torch.dtype or None, found 'bf16'"):
        ShardingPolicy(**{name: "bf16"})
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(ValueError, match=f"{name} must be a floating dtype of 16 bits or more, found {dtype}"):
            ShardingPolicy(**{name: dtype})


def test_a_policy_for_shard_is_a_shardingpolicy_or_gives_one() -> None:
    for wrong in ("bf16", lambda name, module: "bf16"):
        with pytest.raises(TypeError, match=r"policy must be a zero3\.ShardingPolicy"):
            zero3.shard(blocks(), nn.Linear, policy=wrong)  # type: ignore[arg-type]


def test_report_knows_the_bytes_of_a_layer_in_param_dtype() -> None:
    model = in_layers(blocks(), None, ShardingPolicy(param_dtype=BF16))
    elements = sum(p.numel() for p in blocks()[0].parameters())
    assert zero3.report(model).largest_layer_bytes == 2 * elements
