"""peft's tools on a sharded model: adapters on fused experts, switched off and on, added and loaded. Right, or a named error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import Turn, assert_at_rest, assert_close, on_two

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


def lora(name: str = "Llama", targets: Any = ("q_proj", "v_proj"), adapters: tuple[str, ...] = ("default",)) -> Any:
    """A model with LoRA adapters that do something from the start; the first is the active one."""
    targets = targets if isinstance(targets, str) else list(targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(ARCHITECTURES[name]._replace(dtype=torch.float32).build(), config)
        for adapter in adapters[1:]:
            model.add_adapter(adapter, config)
            for key, parameter in model.named_parameters():
                if f".{adapter}." in key:
                    parameter.requires_grad_(False)
    return model


def loss(model: nn.Module, turn: Turn, name: str = "Llama") -> Tensor:
    return model(**ARCHITECTURES[name].inputs(turn)).loss


# -- fused experts


def train_experts(rank: Rank, name: str) -> None:
    """Two steps beside copies whose gradients are averaged by hand. (In processes: peft keeps a cache for all threads.)"""
    build = lambda: lora(name, "all-linear")  # noqa: E731
    copies = [build() for _ in range(rank.world_size)]
    assert any("Param" in type(module).__name__ for module in copies[0].modules()), "peft wraps the experts' parameters themselves"
    model = zero3.shard(build())
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    for step in range(2):
        expected = [loss(each, Turn(number, step, rank.world_size), name) for number, each in enumerate(copies)]
        found = loss(model, Turn(rank.number, step, rank.world_size), name)
        assert_close([found], [expected[rank.number]], 1e-5, f"the loss of step {step}")
        found.backward()
        sum(expected, torch.zeros(())).div(rank.world_size).backward()
        for parameters in zip(*(each.parameters() for each in copies), strict=True):
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            for parameter in parameters if gradients else ():
                parameter.data -= 0.1 * sum(gradients)
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    with zero3.full_params(model):
        found_parameters = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    assert_close(found_parameters, {key: parameter.detach() for key, parameter in copies[0].named_parameters()}, 1e-5, "parameters")
    assert_at_rest(model)


def without_warnings(rank: Rank, body: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, which looks for experts that are not fused
        return body(rank, *arguments)


def test_lora_all_linear_on_a_mixture_of_experts() -> None:
    on_ranks(2, without_warnings, train_experts, "Mixtral")


# -- switched off and on


def test_disable_adapter_shows_the_base_and_set_adapter_another() -> None:
    """As DPO and KTO take their reference: between two forwards of a step, the second of them with gradients."""
    plain = lora(adapters=("default", "ref"))
    turn = Turn(0, 0, 1)
    with torch.no_grad():
        policy = loss(plain, turn)
        with plain.disable_adapter():
            base = loss(plain, turn)
        plain.set_adapter("ref")
        reference = loss(plain, turn)
        plain.set_adapter("default")
    assert len({policy.item(), base.item(), reference.item()}) == 3
    trained = loss(plain, turn)
    trained.backward()
    gradients = {key: p.grad for key, p in plain.named_parameters() if p.requires_grad}

    def body(model: Any, group: ThreadCommunicator) -> dict[str, Tensor]:
        for _ in range(2):
            model.zero_grad()
            before = loss(model, turn)
            with torch.no_grad(), model.disable_adapter():
                assert torch.equal(loss(model, turn), base)
                status = model.get_model_status()
                assert not status.enabled and not status.requires_grad["default"], "it answers as it was told to be"
            with torch.no_grad():
                model.set_adapter("ref")
                assert torch.equal(loss(model, turn), reference)
                model.set_adapter("default")
            after = loss(model, turn)
            assert torch.equal(before, trained) and torch.equal(after, trained)
            after.backward()
        with zero3.resident(model), torch.no_grad(), model.disable_adapter():
            assert torch.equal(loss(model, turn), base)
        with model.disable_adapter():
            assert torch.equal(loss(model, turn), base), "with gradients, of which there are none"
        assert_at_rest(model)
        step = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=1.0)
        before_step = {key: value for key, value in zero3.full_state_dict(model, rank0_only=False).items() if key in gradients}
        step.step()
        after_step = zero3.full_state_dict(model, rank0_only=False)
        return {key: value - after_step[key] for key, value in before_step.items()}

    for found in on_two(lambda: lora(adapters=("default", "ref")), body):
        assert_close(found, gradients, 1e-5, "gradients")


def test_set_adapter_of_one_that_its_chunk_does_not_train_is_refused() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        model.set_adapter("ref")
        with pytest.raises(RuntimeError, match=rf"rank {group.rank}: layer .*layers\.0.*default\.weight' \(frozen now\).*set_adapter"):
            loss(model, Turn(0, 0, 1))
        model.set_adapter("default")
        loss(model, Turn(0, 0, 1)).backward()
        assert_at_rest(model)

    on_two(lambda: lora(adapters=("default", "ref")), body)


# -- added, loaded


def adapters_on_disk(folder: Path) -> str:
    lora().save_pretrained(folder)
    return str(folder)


ADDED: dict[str, Callable[[Any, str], Any]] = {
    "add_adapter": lambda model, folder: model.add_adapter("new", peft.LoraConfig(r=2, target_modules=["q_proj"])),
    "load_adapter": lambda model, folder: model.load_adapter(folder, "new"),
    "get_peft_model": lambda model, folder: peft.get_peft_model(model.base_model.model, peft.LoraConfig(r=2, target_modules=["k_proj"])),
}


@pytest.mark.parametrize("name", ADDED)
def test_adapters_are_not_added_to_a_sharded_model(name: str, tmp_path: Path) -> None:
    """Each rank would train its own. The error says so, the model stays as it was."""
    folder = adapters_on_disk(tmp_path)
    plain = lora()
    expected = loss(plain, Turn(0, 0, 1))

    def body(model: Any, group: ThreadCommunicator) -> None:
        names = list(dict(model.named_parameters()))
        with pytest.raises(RuntimeError, match=r"belongs to a sharded model.*weight.*add_adapter, load_adapter\), before it is sharded"):
            ADDED[name](model, folder)
        assert list(dict(model.named_parameters())) == names
        found = loss(model, Turn(0, 0, 1))
        assert torch.equal(found, expected)
        found.backward()
        assert_at_rest(model)

    on_two(lora, body)


def test_load_adapter_over_one_that_is_there(tmp_path: Path) -> None:
    """Inside full_params with writeback; elsewhere it says so."""
    source = lora()
    for key, parameter in source.named_parameters():
        if "lora" in key:
            parameter.data += 1
    source.save_pretrained(tmp_path)
    expected = {key: value.clone() for key, value in source.state_dict().items()}

    def body(model: Any, group: ThreadCommunicator) -> dict[str, Tensor]:
        with pytest.raises(RuntimeError, match=r"state_dict\(\).*full_params\(model, writeback=True\).*load_adapter"):
            model.load_adapter(str(tmp_path), "default")
        with zero3.full_params(model, writeback=True):
            model.load_adapter(str(tmp_path), "default", is_trainable=True)
        loss(model, Turn(0, 0, 1)).backward()
        return zero3.full_state_dict(model, rank0_only=False)

    for found in on_two(lora, body):
        assert_close(found, expected, 0.0, "the state")


# -- gradients that nobody uses


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["by itself", "checkpointing", "reentrant", "trained embeddings"])
def test_enable_input_require_grads_is_warned_of_where_it_costs_and_is_not_needed(
    when: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora()
    if how == "trained embeddings":
        model.get_input_embeddings().weight.requires_grad_(True)
    model = zero3.shard(model) if when == "after" else model
    assert "need" not in caplog.text
    if how in ("checkpointing", "reentrant"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
    else:
        model.enable_input_require_grads()
    model = zero3.shard(model) if when == "before" else model
    warned = "frozen embeddings needs gradients (enable_input_require_grads)" in caplog.text
    assert warned == (how in ("by itself", "checkpointing"))


def test_without_enable_input_require_grads_backward_gathers_nothing_below_the_first_adapter() -> None:
    def body(model: Any, group: ThreadCommunicator) -> tuple[int, int]:
        found = []
        for enable in (model.disable_input_require_grads, model.enable_input_require_grads):
            enable()
            loss(model, Turn(group.rank, 0, 2)).backward()  # the way is known from here on
            forward = loss(model, Turn(group.rank, 0, 2))
            group.log.clear()
            forward.backward()
            found.append(sum(entry.kind == "all_gather" for entry in group.log))
        return found[0], found[1]

    for below, all_layers in on_two(lambda: lora(targets=r".*layers\.1\..*q_proj"), body):
        assert (below, all_layers) == (1, 2), "the block with adapters; with it the block below too"
