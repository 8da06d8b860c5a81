"""generate() as plain modules call it, on a model that is sharded and not resident; and models that change their weights in eval."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest
from tests.support.stacks import WIDTH, Block, Stack, built, loss_of, train, words_of
from tests.support.trainers import SIZES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning:transformers")


class Prompted(Stack):
    """Its generation begins with a parameter of the root's, as image tokens of Blip-2 and LLaVA do, and reads another at the end."""

    def __init__(self) -> None:
        super().__init__(*[Block(7 + i) for i in range(3)])
        self.prompt, self.scale = nn.Parameter(torch.randn(1, 2, WIDTH)), nn.Parameter(torch.tensor(1.5))

    def forward(self, words: Tensor) -> Tensor:
        return self.continued(torch.cat([self.prompt.expand(len(words), -1, -1), self.embed(words)], 1))

    def continued(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.through_blocks(x)))[:, 2:]

    @torch.no_grad()
    def generate(self, words: Tensor, length: int = 3) -> Tensor:
        """Greedy; each word is scored with what its forward was given."""
        total = self.prompt.sum() * 0
        for _ in range(length):
            scores = self(words)[:, -1] * self.scale
            total = total + scores.max() + self.prompt[0, 0, 0]
            words = torch.cat([words, scores.argmax(-1, keepdim=True)], 1)
        return torch.cat([words.double().flatten(), total[None]])


def on_ranks(size: int, build: Callable[[], nn.Module], body: Callable[[Any, ThreadCommunicator], Any], **options: Any) -> list[Any]:
    models = [build() for _ in range(size)]
    return run_ranks(size, lambda group: body(zero3.shard(models[group.rank], process_group=group, **options), group))


@WORLDS
@pytest.mark.parametrize("policy", [{}, {"prefetch_depth": 0}, {"dynamic": True}, {"stage": 2}, {"param_dtype": torch.float32}], ids=str)
def test_generate_reads_the_roots_parameters_between_its_forwards(policy: dict[str, Any], world_size: int) -> None:
    build = lambda: built(Prompted)  # noqa: E731
    plain = build().to(policy.get("param_dtype", torch.float64))
    words = words_of(Turn(0, 0, 1))
    expected = plain.generate(words)

    def body(model: Prompted, group: ThreadCommunicator) -> int:
        with pytest.raises(RuntimeError, match=r"'prompt' of layer the root \(Prompted\) is released.*with zero3.resident\(model\)"):
            model.prompt.expand(2, -1, -1)
        assert torch.equal(model.generate(words), expected)
        if "stage" not in policy:  # layers that stay whole are never at rest
            assert_at_rest(model)
        before = len(group.log)
        assert torch.equal(model.generate(words, length=3), expected)
        gathers = [line.numel for line in group.log[before:] if line.kind == "all_gather"]
        with zero3.resident(model):
            assert torch.equal(model.generate(words), expected)
        with pytest.raises(ZeroDivisionError), zero3.resident(model):
            model.generate(words, length=1 // 0)
        with pytest.raises(TypeError):
            model.generate(words, length="3")
        loss = train(model, Turn(0, 0, 1))
        assert loss.isfinite()
        own = sum(chunk.layout.padded_numel for chunk in model._zero3_root.chunks)
        return gathers.count(own)

    found = on_ranks(world_size, build, body, policy=zero3.ShardingPolicy(**policy))
    gathers = world_size > 1 or "param_dtype" in policy
    assert found == [int(gathers)] * world_size, "the root is gathered once a call, not once a word"


def blip2() -> Any:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = t.Blip2Config(
        vision_config={**small, "image_size": 16, "patch_size": 8},
        qformer_config={**small, "encoder_hidden_size": 16, "vocab_size": 96},
        text_config={"model_type": "opt", **small, "ffn_dim": 24, "vocab_size": 96, "word_embed_proj_dim": 16, "dropout": 0.0},
        num_query_tokens=2,
        image_token_index=95,
    )  # fmt: skip
    return built(lambda: t.Blip2ForConditionalGeneration(config)).float().eval()


def test_generate_of_a_model_with_query_tokens() -> None:
    """Blip-2's generate() reads `query_tokens`, which belong to the root."""
    turn = Turn(0, 0, 1)
    words = torch.cat([torch.full((1, 2), 95), turn.integers(80, 1, 4) + 5], 1)
    inputs = {"pixel_values": turn.tensor(1, 3, 16, 16).float(), "input_ids": words}
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = blip2().generate(**inputs, **options)

    def body(model: Any, group: ThreadCommunicator) -> None:
        assert torch.equal(model.generate(**inputs, **options), expected)
        with zero3.resident(model):
            assert torch.equal(model.generate(**inputs, **options), expected)
        assert_at_rest(model)

    on_ranks(2, blip2, body)


# -- models that change their own weights


class Rescaled(Stack):
    """As RWKV does: in eval it halves weights in place and remembers that, in training it doubles them again."""

    def __init__(self) -> None:
        super().__init__(*[Block(7 + i) for i in range(3)])
        self.rescaled = False

    def forward(self, words: Tensor) -> Tensor:
        self.rescale()
        return super().forward(words)

    @torch.no_grad()
    def rescale(self) -> None:
        if self.rescaled == self.training:
            for block in self.blocks:
                block.down.weight.mul_(2.0 if self.training else 0.5)
            self.rescaled = not self.training


def rescaled_losses() -> list[Tensor]:
    plain = built(Rescaled)
    return [loss_of(plain.train(mode), Turn(0, step, 1)).detach() for step, mode in enumerate([True, False, True])]


def test_weights_changed_inside_resident_are_told_of() -> None:
    """The change would be undone, and what the model remembers of it would not."""
    _, expected, _ = rescaled_losses()

    def body(model: Rescaled, group: ThreadCommunicator) -> None:
        text = rf"rank {group.rank}: inside resident, the values of 'down.weight' of layer 'blocks.0' .*changed.*writeback=True"
        with pytest.raises(RuntimeError, match=text), zero3.resident(model.eval()), torch.no_grad():
            assert torch.equal(loss_of(model, Turn(0, 1, 1)), expected), "inside it is right"
        assert_at_rest(model)

    on_ranks(2, lambda: built(Rescaled), body)


def test_weights_changed_in_a_plain_call_are_refused_by_name() -> None:
    def body(model: Rescaled, group: ThreadCommunicator) -> None:
        with pytest.raises(
            RuntimeError, match=r"mul_: 'down.weight' of layer 'blocks.0' \(Block\) is released.*change it there with writeback=True"
        ):
            model.eval()(words_of(Turn(0, 0, 1)))

    on_ranks(2, lambda: built(Rescaled), body)


def test_weights_changed_where_they_are_written_back() -> None:
    """The way that the errors name: there and back."""
    first, second, third = rescaled_losses()

    def body(model: Rescaled, group: ThreadCommunicator) -> None:
        assert torch.equal(loss_of(model, Turn(0, 0, 1)), first)
        for mode, step, expected in ((False, 1, second), (True, 2, third)):
            model.train(mode)
            with zero3.full_params(model, writeback=True):
                model.rescale()
            assert torch.equal(loss_of(model, Turn(0, step, 1)), expected)
            with zero3.resident(model), torch.no_grad():
                assert torch.equal(loss_of(model, Turn(0, step, 1)), expected)

    on_ranks(2, lambda: built(Rescaled), body)


def test_weights_changed_inside_resident_inside_full_params_are_written_back() -> None:
    """The outer context says what becomes of them."""
    _, expected, _ = rescaled_losses()

    def body(model: Rescaled, group: ThreadCommunicator) -> None:
        with zero3.full_params(model, writeback=True), zero3.resident(model.eval()), torch.no_grad():
            assert torch.equal(loss_of(model, Turn(0, 1, 1)), expected)
        assert torch.equal(loss_of(model, Turn(0, 1, 1)), expected), "the change stayed"

    on_ranks(2, lambda: built(Rescaled), body)


@pytest.mark.parametrize("how", ["in place and back", "data and back", "another tensor, the same values"])
def test_resident_lets_pass_what_is_as_it_was_at_its_end(how: str) -> None:
    def body(model: Stack, group: ThreadCommunicator) -> None:
        expected = loss_of(model, Turn(0, 0, 1))
        with zero3.resident(model), torch.no_grad():
            weight = model.blocks[1].up.weight
            if how == "in place and back":
                weight.add_(1e3)
                weight.sub_(1e3)
            elif how == "data and back":
                weight.data += 0.1
                weight.data -= 0.1
            else:
                weight.data = weight.data.clone()
        assert torch.equal(loss_of(model, Turn(0, 0, 1)), expected), "to the bit"

    on_ranks(2, lambda: built(Prompted), body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_resident_tells_of_data_that_was_replaced(world_size: int) -> None:
    def body(model: Stack, group: ThreadCommunicator) -> None:
        with pytest.raises(RuntimeError, match=r"inside resident, the values of 'up.weight' of layer 'blocks.1'"), zero3.resident(model):
            model.blocks[1].up.weight.data = model.blocks[1].up.weight.data + 1

    on_ranks(world_size, lambda: built(Prompted), body)


# -- continuous batching: transformers calls the model from a thread

HAS_IT = pytest.mark.skipif(not hasattr(t, "ContinuousBatchingConfig"), reason="an older transformers has another one")


def small_llama() -> Any:
    torch.manual_seed(0)
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).eval()


def small_llama_with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(small_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()


BATCHES: dict[str, Callable[[Any, list[list[int]]], Any]] = {
    "init_continuous_batching": lambda model, prompts: model.init_continuous_batching(),
    "continuous_batching_context_manager": lambda model, prompts: model.continuous_batching_context_manager(),
}


@HAS_IT
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", BATCHES)
def test_continuous_batching_by_hand_outside_of_resident_says_so_on_all_ranks(name: str, world_size: int) -> None:
    """What is around it stays as it was."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(RuntimeError, match=r"continuous batching calls.*Put all of it inside of `with zero3\.resident\(model\):`"):
            BATCHES[name](model, [[3, 4, 5]])
        assert_at_rest(model)
        model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()

    on_ranks(world_size, small_llama, body)


@HAS_IT
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("build", [small_llama, small_llama_with_adapters])
def test_generate_batch_gives_what_one_plain_process_gives(build: Callable[[], Any], inside: bool) -> None:
    """Ranks with other numbers of prompts and lengths, and one without. It is resident, also where it is inside of that."""
    prompts = [[3, 4, 5], [7, 8, 9, 10]]
    config = t.GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = t.ContinuousBatchingConfig(page_size=32, num_blocks=8, max_batch_tokens=32)

    def completed(model: Any, given: list[list[int]]) -> list[list[int]]:
        made = model.generate_batch(given, generation_config=config, continuous_batching_config=sizes, warmup=False)
        return [each.generated_tokens for each in made.values()]

    def body(model: Any, group: ThreadCommunicator) -> list[list[int]]:
        with zero3.resident(model) if inside else nullcontext():
            found = completed(model, prompts[: 2 - group.rank])
        assert_at_rest(model)
        model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
        return found

    expected = completed(build(), prompts)
    assert len(expected) == 2
    assert on_ranks(3, build, body) == [expected, expected[:1], []]


@HAS_IT
def test_after_an_exception_in_generate_batch_on_one_rank_layers_are_released() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        if group.rank:
            with pytest.raises(AttributeError):
                model.generate_batch([[3, 4]], generation_config="none")
        else:
            model.generate_batch([])
        assert_at_rest(model)
        model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()

    on_ranks(2, small_llama, body)


@HAS_IT
@pytest.mark.parametrize("who", ["the model", "the caller"])
def test_after_an_exception_while_generate_batch_runs_the_model_layers_are_released(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the model in a thread of its own. On one rank the model raises there, or the caller is interrupted while he waits."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager as Manager

    config = t.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = t.ContinuousBatchingConfig(page_size=32, num_blocks=8, max_batch_tokens=32)
    interrupted, get_result, began = set[threading.Thread](), Manager.get_result, threading.Event()

    def got(manager: Any, **options: Any) -> Any:
        if threading.current_thread() in interrupted:
            assert began.wait(20)
            raise KeyboardInterrupt
        return get_result(manager, **options)

    monkeypatch.setattr(Manager, "get_result", got)

    def body(model: Any, group: ThreadCommunicator) -> None:
        calls: list[threading.Thread] = []

        def called(*_: Any) -> None:
            calls.append(threading.current_thread())
            began.set()
            if len(calls) == 3 and who == "the model":
                raise ArithmeticError("the model")

        hook = model.model.layers[0].register_forward_pre_hook(called) if group.rank else None
        if group.rank and who == "the caller":
            interrupted.add(threading.current_thread())
        with pytest.raises(KeyboardInterrupt) if group.rank and who == "the caller" else nullcontext():
            made = model.generate_batch([[3, 4, 5]], generation_config=config, continuous_batching_config=sizes, warmup=False)
            assert group.rank or len(made) == 1
        if hook is not None:
            hook.remove()
            assert calls and threading.current_thread() not in calls
        assert_at_rest(model)
        model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()

    on_ranks(2, small_llama, body)


class Stops(t.StoppingCriteria):
    """It raises at the second word."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.asked = error, 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Any:
        self.asked += 1
        if self.asked == 2:
            raise self.error("no more")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("policy", [{}, {"reshard_after_forward": False}, {"stage": 2}, {"offload": "cpu"}], ids=str)
@pytest.mark.parametrize("where", ["on one rank, resident", "on all ranks, resident", "on all ranks"])
def test_training_goes_on_after_generate_was_broken_off(where: str, policy: dict[str, Any], error: type[BaseException]) -> None:
    """Between a backward and its step, with the numbers of plain torch, and with nothing left fetched."""
    torch.manual_seed(0)
    config = t.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=19, n_positions=32, bos_token_id=1, eos_token_id=None)
    plain = t.GPT2LMHeadModel(config).double().eval()
    copies = [copy.deepcopy(plain) for _ in range(2)]
    words = [torch.randint(19, (2, 5), generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

    def body(group: ThreadCommunicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        model, given = copies[group.rank], words[group.rank]
        zero3.shard(model, process_group=group, policy=zero3.ShardingPolicy(**policy))
        optimizer, said = torch.optim.AdamW(zero3.get_trainable_chunk(model), 0.01), []
        for _ in range(2):
            model(given, labels=given).loss.backward()
            breaks = group.rank == 1 or "all" in where
            with pytest.raises(error) if breaks else nullcontext(), zero3.resident(model) if "resident" in where else nullcontext():
                model.generate(given, **options, stopping_criteria=[Stops(error)] if breaks else None)
            optimizer.step()
            optimizer.zero_grad()
            said.append(model.generate(given, **options))
        if "stage" not in policy:
            assert_at_rest(model)
        return said, zero3.full_state_dict(model, rank0_only=False)

    found = run_ranks(2, body)
    optimizer = torch.optim.AdamW(plain.parameters(), 0.01)
    for step in range(2):
        for given in words:
            (plain(given, labels=given).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank, (said, _) in enumerate(found):
            assert torch.equal(said[step], plain.generate(words[rank], **options))
    for _, state in found:
        for name, value in plain.state_dict().items():
            if name in state:
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)
