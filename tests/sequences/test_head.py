"""The head's loss without logits: linear_cross_entropy and causal_lm_loss, against plain torch and transformers."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers as t
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import zero3
from tests.support.live import LiveBytes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.stacks import WORDS, Block, Stack, built
from zero3.sequences.causal_lm import is_by_chunks
from zero3.sequences.chunks import Classes, chunked_cross_entropy

CONFIG = t.LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


def drawn(*shape: int, seed: int = 0, high: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator) if high else torch.randn(shape, generator=generator, dtype=dtype)


def llama(seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return t.LlamaForCausalLM(t.LlamaConfig(**{**CONFIG.to_dict(), **options}))


@given(st.integers(0, 600), st.integers(1, 40), st.sampled_from(["mean", "sum", "none"]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_linear_cross_entropy_by_chunks_of_ours(n: int, words: int, reduction: str, weighted: bool, biased: bool, seed: int) -> None:
    """That of older torch, and of loss in float32: values and all gradients, rows that do not count, classes with weights."""
    target = drawn(n, seed=seed, high=words).where(drawn(n, seed=seed + 1, high=4) > 0, -100)
    inputs = [drawn(n, 6, seed=seed), drawn(words, 6, seed=seed + 2), drawn(words, seed=seed + 3)]
    x, w, b = (each.requires_grad_() for each in inputs)
    classes = drawn(words, seed=seed + 4).abs() + 0.1 if weighted else None
    if reduction == "mean" and not bool((target != -100).any()):
        return  # NaN in both
    mine = chunked_cross_entropy(x, w, b if biased else None, Classes(target, classes, -100, reduction))
    theirs = functional.cross_entropy(functional.linear(x, w, b if biased else None), target, weight=classes, reduction=reduction)
    torch.testing.assert_close(mine, theirs)
    upstream = drawn(*mine.shape, seed=seed + 5)
    of = [x, w, *([b] if biased else [])]
    for found, expected in zip(torch.autograd.grad(mine, of, upstream), torch.autograd.grad(theirs, of, upstream), strict=True):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(x, w, None, Classes(target, classes, -100, reduction)).shape, theirs.shape)


def test_a_batch_without_a_token_that_counts_has_a_loss_of_nan_and_gradients_of_zero() -> None:
    """As transformers' own: such a micro-batch spoils no other's gradients."""
    model = llama()
    batch = {"input_ids": drawn(2, 5, high=61), "labels": torch.full((2, 5), -100)}
    loss = zero3.causal_lm_loss(model, **batch)
    loss.backward()
    assert loss.isnan() and all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    x, w = drawn(4, 3).requires_grad_(), drawn(5, 3, seed=1).requires_grad_()
    mean = chunked_cross_entropy(x, w, None, Classes(torch.full((4,), -100), None, -100, "mean"))
    mean.backward()
    assert mean.isnan() and not x.grad.any() and not w.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ignored", [-100, 0, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("options", ["auto", "of one row", None])
@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
def test_linear_cross_entropy_is_torchs_where_no_row_counts_or_some_do(
    dtype: torch.dtype, ignored: int, weighted: bool, smoothing: float, options: Any
) -> None:
    """The mean over nothing is NaN, and its gradients are zeros. Where rows count, torch's own chunks give the same bits."""
    if options == "of one row":
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=1) if hasattr(nn, "LinearCrossEntropyOptions") else "auto"
    weight = torch.tensor([0, 0.5, 2, 1, 3], dtype=dtype) if weighted else None
    named: dict[str, Any] = {"weight": weight, "ignore_index": ignored, "label_smoothing": smoothing}
    for target in (torch.full((6,), ignored), torch.tensor([4, ignored, 2, 1, ignored, 2])):
        head, x = nn.Linear(3, 5).to(dtype), drawn(6, 3, dtype=dtype).requires_grad_()
        of = [x, *head.parameters()]
        loss = zero3.linear_cross_entropy(x, head, target, options=options, **named)
        expected = functional.cross_entropy(head(x), target, **named)
        found, plain = (torch.autograd.grad(each, of) for each in (loss, expected))
        bound = 1e-12 if dtype is torch.float64 else 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close((loss, *found), (expected, *plain), rtol=bound, atol=bound, equal_nan=True)
        if bool((target == ignored).all()):
            assert loss.isnan() and not any(each.any() for each in found)
        elif hasattr(functional, "linear_cross_entropy"):
            theirs = nn.LinearCrossEntropyOptions() if options == "auto" else options
            loss_there = functional.linear_cross_entropy(x, head.weight, target, linear_bias=head.bias, options=theirs, **named)
            assert torch.equal(loss, loss_there)
            assert all(map(torch.equal, found, torch.autograd.grad(loss_there, of)))


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_a_causal_loss_divided_by_no_items_has_gradients_of_zero(items: Any) -> None:
    model, ids = llama(), drawn(2, 5, high=61)
    loss = zero3.causal_lm_loss(model, input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=items)
    loss.backward()
    assert loss.isnan() and all(not p.grad.any() for p in model.parameters() if p.grad is not None)


class WithAnotherTerm(t.LlamaForCausalLM):
    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(*args, labels=labels, **kwargs)
        found.loss = found.loss + 1
        return found


def with_another_loss(model: Any) -> Any:
    model.loss_function = lambda *args, **kwargs: torch.tensor(7.0)
    return model


def prompted(kind: Any) -> Any:
    return peft.get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.parametrize(
    ("model", "by_chunks", "refused"),
    [
        (lambda: llama(), True, False),
        (lambda: peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")), True, False),
        (lambda: WithAnotherTerm(CONFIG), False, False),
        (lambda: with_another_loss(llama()), False, True),
        (lambda: prompted(peft.PromptTuningConfig), False, True),
    ],
)
def test_a_trainer_leaves_a_loss_alone_that_is_not_the_plain_one(model: Any, by_chunks: bool, refused: bool) -> None:
    """`Zero3Trainer` asks `is_by_chunks`. `causal_lm_loss`, which was asked for by name, refuses what it can know."""
    made = model()
    batch = {"input_ids": drawn(2, 5, high=61), "labels": drawn(2, 5, high=61)}
    for each in (made, zero3.shard(made)):
        assert is_by_chunks(each, batch) is by_chunks
        if refused:
            with pytest.raises(ValueError, match=r"Take model\(\*\*batch\).loss"):
                zero3.causal_lm_loss(each, **batch)


def test_linear_cross_entropy_says_that_its_gradients_are_used_up() -> None:
    x, w = drawn(4, 3).requires_grad_(), drawn(5, 3, seed=1)
    loss = chunked_cross_entropy(x, w, None, Classes(drawn(4, high=5), None, -100, "sum"))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="options=None"):
        loss.backward()


class Hidden(Stack):
    """Gives what its head would be called with, or the loss."""

    inside = True

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.through_blocks(self.embed(words)))
        return zero3.linear_cross_entropy(hidden, self.head, words.roll(1, 1)) if self.inside else hidden


def made(*, tied: bool = False, frozen: bool = False, inside: bool = True) -> Any:
    model = built(lambda: Hidden(Block(7), Block(8), tied=tied))
    model.inside = inside
    model.head.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("policy", [zero3.ShardingPolicy(), zero3.ShardingPolicy(stage=1)], ids=["3", "1"])
@pytest.mark.parametrize(
    ("layers", "model"),
    [
        (None, {}),
        ([Block], {}),
        (None, {"tied": True}),
        (None, {"frozen": True}),
        (None, {"inside": False}),
        ([Block], {"inside": False}),
        (None, {"tied": True, "inside": False}),
    ],
    ids=["own", "root", "tied", "frozen", "after", "root-after", "tied-after"],
)
def test_linear_cross_entropy_trains_as_plain(layers: Any, model: dict[str, bool], policy: Any) -> None:
    """Its own layer or in the root's, tied or not, frozen or not, in the model's forward or after it. Where it is after it, one rank
    has a micro-batch without a target.
    """
    models = [(made(**model), made(**model)) for _ in range(2)]

    def loss_of(one: Any, words: Tensor, counts: bool, plain: bool) -> Tensor:
        found = one(words)
        if one.inside:
            return found
        target = words.roll(1, 1).masked_fill(torch.tensor(not counts), -100)
        if plain:
            return functional.cross_entropy(one.head(found).flatten(0, 1), target.flatten())
        return zero3.linear_cross_entropy(found, one.head, target)

    def body(group: ThreadCommunicator) -> None:
        mine, plain = models[group.rank]
        zero3.shard(mine, layers, process_group=group, policy=policy)
        steps = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (mine, plain)]
        for step in range(3):
            for rank in range(2):
                words, counts = drawn(2, 5, seed=7 * step + rank, high=WORDS), (step, rank) != (1, 1)
                expected = loss_of(plain, words, counts, plain=True)
                (expected / 2).backward()
                if rank == group.rank:
                    loss = loss_of(mine, words, counts, plain=False)
                    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
                    loss.backward()
            for each in steps:
                each.step()
                each.zero_grad()
        found = zero3.full_state_dict(mine, rank0_only=False)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)

    run_ranks(2, body)


def test_linear_cross_entropy_gathers_and_reduces_the_head_once() -> None:
    """As with logits, or less: whatever the chunks."""
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("torch has no options before 2.13")

    def body(group: ThreadCommunicator) -> list[Any]:
        logs = []
        for options in (None, nn.LinearCrossEntropyOptions(batch_chunk_size=1), "auto"):
            model = zero3.shard(made(inside=False), process_group=group)
            words = drawn(2, 5, high=WORDS)
            for _ in range(2):
                group.log.clear()
                zero3.linear_cross_entropy(model(words), model.head, words, options=options).backward()
            logs.append([(each.kind, each.numel) for each in group.log])
        return logs

    whole, one, auto = run_ranks(2, body)[0]
    assert one == auto == whole and len(whole) > 8


def test_a_step_holds_less_than_half_of_the_logits() -> None:
    """2048 tokens, V = 4096, fp32: with logits it holds them twice."""
    tokens, words, width = 2048, 4096, 64
    logits = tokens * words * 4

    def peak(options: Any) -> int:
        head, hidden = nn.Linear(width, words, bias=False), torch.randn(tokens, width, requires_grad=True)
        target = torch.zeros(tokens, dtype=torch.int64)
        zero3.shard(holder := nn.ModuleDict({"head": head}), [nn.Linear])
        head = holder["head"]
        with LiveBytes() as live:
            return live.peak_of(lambda: zero3.linear_cross_entropy(hidden, head, target, options=options).backward()) - live.now

    assert peak("auto") < logits / 2 < 2 * logits <= peak(None)
    x, w = torch.randn(tokens, width).bfloat16().requires_grad_(), torch.randn(words, width).bfloat16().requires_grad_()
    with LiveBytes() as live:  # of ours
        classes = Classes(torch.zeros(tokens, dtype=torch.int64), None, -100, "sum")
        assert live.peak_of(lambda: chunked_cross_entropy(x, w, None, classes).backward()) < logits / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", ["labels", "shift_labels", "items"])
def test_causal_lm_loss_is_the_models_own(batch: str, dtype: torch.dtype) -> None:
    ids = drawn(2, 9, high=61)
    given: dict[str, Any] = {"input_ids": ids, "labels": ids.where(drawn(2, 9, seed=1, high=3) > 0, -100)}
    if batch == "shift_labels":
        given["shift_labels"] = functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    if batch == "items":
        given["num_items_in_batch"] = torch.tensor(31)
    plain, mine = llama().to(dtype), llama().to(dtype)
    expected = plain(**given).loss
    if batch == "shift_labels":
        del given["labels"]
    zero3.shard(mine)
    loss = zero3.causal_lm_loss(mine, **given)
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    with zero3.full_gradients(mine) as gradients:
        for name, p in plain.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=bound, atol=bound)
    with torch.no_grad():
        torch.testing.assert_close(zero3.causal_lm_loss(mine, **given), expected.detach(), rtol=1e-5, atol=1e-5)


def test_causal_lm_loss_under_autocast_and_checkpointing_on_ranks() -> None:
    models = [(llama(), llama()) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        mine, plain = models[group.rank]
        zero3.shard(mine, process_group=group)
        mine.gradient_checkpointing_enable({"use_reentrant": False})
        ids = drawn(2, 9, seed=group.rank, high=61)
        with torch.autocast("cpu", torch.bfloat16):
            loss, expected = zero3.causal_lm_loss(mine, input_ids=ids, labels=ids), plain(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        loss.backward()
        assert all(chunk.grad is not None for chunk in zero3.get_trainable_chunk(mine))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("model", "batch", "match"),
    [
        (lambda: llama(logits_scaling=2.0), {}, "logits_scaling"),
        (lambda: llama(final_logit_softcapping=30.0), {}, "final_logit_softcapping"),
        (llama, {"output_router_logits": True}, "output_router_logits.*auxiliary"),
        (llama, {"logits_to_keep": 2}, "logits_to_keep"),
        (llama, {"labels": None}, "needs labels"),
        (llama, {"reduction": "none"}, "reduction"),
        (llama, {"reduction": "sum", "num_items_in_batch": 7}, "num_items_in_batch divides"),
        (lambda: t.T5ForConditionalGeneration(t.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)), {}, "encoder-decoder"),
        (lambda: t.LlamaModel(CONFIG), {}, "output embeddings"),
    ],
)
def test_causal_lm_loss_refuses_what_is_another_loss(model: Any, batch: dict[str, Any], match: str) -> None:
    ids = drawn(1, 4, high=9)
    with pytest.raises(ValueError, match=match):
        zero3.causal_lm_loss(model(), **{"input_ids": ids, "labels": ids, **batch})


def test_causal_lm_loss_sees_that_logits_are_changed_after_the_head() -> None:
    class Capped(t.LlamaForCausalLM):
        def forward(self, **batch: Any) -> Any:
            found = super().forward(**batch)
            found.logits = found.logits * 2.0
            return found

    with pytest.raises(ValueError, match="other logits than its head"):
        zero3.causal_lm_loss(Capped(CONFIG), input_ids=drawn(1, 4, high=9), labels=drawn(1, 4, high=9))


def test_linear_cross_entropy_refuses_other_heads() -> None:
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["lm_head"]))
    x, target = drawn(2, 16, dtype=torch.float32), drawn(2, high=9)
    with pytest.raises(TypeError, match="an adapter of peft"):
        zero3.linear_cross_entropy(x, adapted.base_model.model.lm_head, target)
    with pytest.raises(TypeError, match="Tanh"):
        zero3.linear_cross_entropy(x, nn.Tanh(), target)
    head = nn.Linear(16, 9)
    with pytest.raises(ValueError, match=r"target \[3\]"):
        zero3.linear_cross_entropy(x, head, target[:1].expand(3))
    with pytest.raises(ValueError, match="'max'"):
        zero3.linear_cross_entropy(x, head, target, reduction="max")
    with pytest.raises(TypeError, match="options"):
        zero3.linear_cross_entropy(x, head, target, options=3)


def test_linear_cross_entropy_with_an_embedding_smoothing_and_an_empty_batch() -> None:
    head = nn.Embedding(9, 16)
    x, target = drawn(2, 3, 16, dtype=torch.float32), drawn(2, 3, high=9)
    each = zero3.linear_cross_entropy(x, head, target, reduction="none")
    torch.testing.assert_close(
        each, functional.cross_entropy((x @ head.weight.t()).flatten(0, 1), target.flatten(), reduction="none").view(2, 3)
    )
    smooth = zero3.linear_cross_entropy(x, head, target, label_smoothing=0.1, options=None)
    torch.testing.assert_close(smooth, functional.cross_entropy((x @ head.weight.t()).flatten(0, 1), target.flatten(), label_smoothing=0.1))
    nothing = zero3.linear_cross_entropy(x[:0], head, target[:0], reduction="sum")
    nothing.backward()
    assert nothing.item() == 0 and head.weight.grad is not None and not head.weight.grad.any()
