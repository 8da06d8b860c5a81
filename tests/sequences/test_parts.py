"""Parts of sequences over ranks (sp) train as one plain process on all tokens of all groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import scaled_dot_product_attention

import zero3
from tests.pairs.joining import on_threads
from tests.sequences.attending import HOWS, own
from tests.sequences.texts import WORDS, assert_gradients, batch, made, plain_step, plain_sum, step
from tests.support.ranks import run_parts, run_ranks
from zero3.sequences.attention import check_model


def check(groups: int, parts: int, tokens: list[int], padding: str = "", **model: Any) -> None:
    """Two steps of clipped AdamW, and the gradients of a third."""
    models = [made(**model) for _ in range(groups * parts)]
    plain = made(**model)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    for number in range(3):
        theirs.zero_grad()
        plain_step(plain, [batch(group, tokens[group], padding, step=number) for group in range(groups)])
        if number < 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(mine), 0.01)
        for number in range(3):
            optimizer.zero_grad()
            index = group.rank // parts
            step(mine, batch(index, tokens[index], padding, step=number))
            if number < 2:
                zero3.clip_grad_norm_(mine, 0.5)
                optimizer.step()
        assert_gradients(mine, plain)

    run_parts(groups, parts, body)


@pytest.mark.parametrize(
    ("groups", "parts", "tokens", "padding", "model"),
    [
        (1, 2, [9], "", {}),
        (2, 2, [6, 9], "left", {"kind": "Qwen3"}),
        (1, 2, [9], "right", {"attention": "eager", "kind": "Qwen2"}),
        (1, 4, [10], "packed", {"keys": 1}),
        (1, 2, [12], "left", {"kind": "Mistral", "sliding_window": 4}),
        (1, 2, [9], "packed", {"heads": 6, "keys": 3, "attention": "eager"}),
        (1, 4, [2], "", {"keys": 4}),
    ],
    ids=["even", "groups", "eager", "packed", "window", "odd-heads", "fewer-tokens-than-ranks"],
)
def test_parts_of_sequences_train_as_plain(groups: int, parts: int, tokens: list[int], padding: str, model: dict[str, Any]) -> None:
    check(groups, parts, tokens, padding, **model)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("padding", ["", "left", "right", "packed"])
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_sequences_and_key_heads(parts: int, padding: str, keys: int, attention: str) -> None:
    padding = "right" if (padding, attention) == ("left", "eager") else padding  # NaN in one plain process
    check(1, parts, [11], padding, keys=keys, attention=attention)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("pending", [1, 2], ids=["one", "two-forwards"])
def test_parts_are_exchanged_again_where_they_are_recomputed(reentrant: bool, pending: int) -> None:
    """Also if another forward, of other lengths, has followed before the backward."""
    models, plain = [made() for _ in range(2)], made()
    batches = [batch(0, 7 + 4 * number, "left", step=number) for number in range(pending)]
    for each in batches:
        plain_sum(plain, each)[0].backward()

    def body(group: Any) -> list[int]:
        mine = zero3.shard(models[group.rank], process_group=group, policy=zero3.ShardingPolicy(gradient_reduction="sum"))
        mine.gradient_checkpointing_enable({"use_reentrant": reentrant})
        mine.train()
        losses = [zero3.causal_lm_loss(mine, reduction="sum", **zero3.split_sequence(mine, each)) for each in batches]
        forward = len([each for each in group.sequence_group.log if each.kind == "all_to_all"])
        for loss in reversed(losses):
            loss.backward()
        assert_gradients(mine, plain)
        return [forward, len([each for each in group.sequence_group.log if each.kind == "all_to_all"])]

    for found in run_parts(1, 2, body):
        assert found == [4 * pending, 12 * pending]  # two in a block's forward, and two recomputed, and two in backward


def test_one_part_is_to_the_bit_what_it_is_without_sp() -> None:
    models = [made() for _ in range(4)]
    whole = batch(0, 9)

    def gradients(run: Any) -> list[dict[str, Tensor]]:
        def body(group: Any) -> dict[str, Tensor]:
            mine = zero3.shard(models.pop(), process_group=group)
            step(mine, whole)
            assert mine(**whole).loss.isfinite()  # labels too are as without
            with zero3.full_gradients(mine) as found:
                return {name: each.clone() for name, each in found.items()}

        return run(body)

    plain, alone = gradients(partial(run_ranks, 2)), gradients(partial(run_parts, 2, 1))
    for one, other in zip(plain, alone, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_gradients_of_parts_are_as_near_as_one_processs(dtype: torch.dtype) -> None:
    models, (exact, rounded), whole = [made().to(dtype) for _ in range(2)], (made(), made().to(dtype)), batch(0, 9, "left")
    for plain in (exact, rounded):
        plain_step(plain, [whole])

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group)
        step(mine, whole)
        with zero3.full_gradients(mine) as found:
            for (name, true), theirs in zip(exact.named_parameters(), rounded.parameters(), strict=True):
                errors = [float((each.double() - true.grad).norm() / true.grad.norm()) for each in (found[name], theirs.grad)]
                assert errors[0] <= (1e-5 if dtype == torch.float32 else 2 * errors[1] + 1e-3), (name, errors)

    run_parts(1, 2, body)


def test_parts_of_embeddings_and_what_goes_with_them() -> None:
    """Each tensor `[B, S, ...]` beside embeddings is cut; what has another shape passes."""
    models, plain, whole = [made() for _ in range(2)], made(), batch(0, 7)
    embeds = plain.get_input_embeddings()(whole["input_ids"]).detach()
    expected = plain(inputs_embeds=embeds, use_cache=False).logits

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group)
        given = {"inputs_embeds": embeds, "token_type_ids": whole["input_ids"], "speakers": embeds[..., :2], "scale": embeds[0, 0]}
        part = zero3.split_sequence(mine, given)
        for name in ("inputs_embeds", "token_type_ids", "speakers"):
            assert torch.equal(part[name], given[name].tensor_split(2, 1)[group.rank])
        assert part["scale"] is given["scale"]
        found = mine(inputs_embeds=part["inputs_embeds"], position_ids=part["position_ids"]).logits
        torch.testing.assert_close(found, expected.tensor_split(2, 1)[group.rank], rtol=1e-6, atol=1e-8)

    run_parts(1, 2, body)


def test_parts_give_at_most_the_bytes_of_the_formula() -> None:
    heads, keys, parts, tokens, rows, width = 8, 2, 4, 20, 3, 8
    models = [made(heads=heads, keys=keys) for _ in range(parts)]
    served = max(keys, parts)  # each of two key heads goes to two ranks

    def body(group: Any) -> tuple[int, int]:
        mine = zero3.shard(models[group.rank], process_group=group)
        sent = []
        twin = zero3.sequences.parts.parts_of(mine).group
        plain_swap = twin.all_to_all

        def counted(received: Tensor, flat: Tensor, *bounds: Any) -> Any:
            sent.append(flat.nbytes)
            return plain_swap(received, flat, *bounds)

        twin.all_to_all = counted
        with torch.no_grad():
            part = zero3.split_sequence(mine, batch(0, tokens, rows=rows))
            zero3.causal_lm_loss(mine, reduction="sum", **part)
        return sum(sent), part["input_ids"].shape[1]

    for sent, part in run_parts(1, parts, body):
        formula = 2 * rows * part * width * 8 * (2 * heads + 2 * served)  # two blocks, float64
        assert 0 < sent <= 1.05 * formula


def test_profile_shows_exchanges() -> None:
    """Two a block in forward, two in backward, for whoever computes: queries, keys and values there, outputs back."""
    heads, parts, tokens, rows, width = 4, 2, 10, 2, 8
    models = [made(heads=heads, keys=heads) for _ in range(parts)]

    def body(group: Any) -> Any:
        mine = zero3.shard(models[group.rank], process_group=group)
        step(mine, batch(0, tokens, rows=rows))
        with zero3.profile(mine) as found:
            step(mine, batch(0, tokens, rows=rows))
        return found

    for found in run_parts(1, parts, body):
        blocks = [layer for layer in found.layers if layer.exchanges]
        assert [layer.label.split("'")[1] for layer in blocks] == ["model.layers.0", "model.layers.1"]
        for layer in blocks:
            own = [each for each in found.transfers if each.kind == "exchange" and each.layer == layer.label]
            assert [each.phase for each in own] == ["forward"] * 2 + ["backward"] * 2
            tensor = rows * (tokens // parts) * width * 8 * heads // parts  # float64: half of the heads of a part
            assert [each.nbytes for each in own] == [3 * tensor, tensor, tensor, 3 * tensor]
            assert layer.exchange_ms == pytest.approx(1e3 * sum(each.exposed for each in own))
            assert layer.exposed_ms >= layer.exchange_ms > 0
        assert sum(span.end - span.begin for span in found.spans) + found.exposed_ms / 1e3 <= found.seconds
        assert "for 8 exchanges of parts of sequences" in str(found)


# -- a model of one's own


@pytest.mark.parametrize("how", HOWS)
def test_attend_in_a_model_of_ones_own(how: str) -> None:
    models, plain, whole = [own(how) for _ in range(2)], own(), batch(0, 7)["input_ids"]
    plain(whole).square().sum().backward()

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group, policy=zero3.ShardingPolicy(gradient_reduction="sum"))
        part = zero3.split_sequence(mine, {"input_ids": whole})
        mine(part["input_ids"]).square().sum().backward()
        assert_gradients(mine, plain, 1e-9)
        with zero3.resident(mine), torch.no_grad():
            torch.testing.assert_close(mine(whole), plain(whole))  # each rank for itself

    run_parts(1, 2, body)


def test_attend_elsewhere_is_a_plain_call() -> None:
    q = torch.randn(1, 3, 5, 2)
    assert torch.equal(zero3.attend(scaled_dot_product_attention, q, q, q), scaled_dot_product_attention(q, q, q))
    whole = batch(0, 5)
    part = zero3.split_sequence(own(), whole)
    assert torch.equal(part["input_ids"], whole["input_ids"]) and "labels" not in part
    assert torch.equal(part["shift_labels"][:, :-1], whole["labels"][:, 1:]) and (part["shift_labels"][:, -1] == -100).all()


# -- never a wrong number in silence


def refused(model: Any, call: Any, match: str, kind: type[Exception] = ValueError, **options: Any) -> None:
    """On all ranks of the group."""
    models = [model() for _ in range(2)]

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group, **options)
        with pytest.raises(kind, match=match):
            call(mine, group)

    run_parts(1, 2, body)


def part_of(mine: Any, **more: Any) -> dict[str, Any]:
    return {**zero3.split_sequence(mine, batch(0, 8)), **more}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m, g: m(input_ids=batch(0, 4)["input_ids"], labels=batch(0, 4)["labels"]), "split_sequence"),
        (lambda m, g: zero3.causal_lm_loss(m, reduction="sum", **batch(0, 4)), "split_sequence"),
        (lambda m, g: zero3.causal_lm_loss(m, **part_of(m)), r'"sum".*zero3\.backward'),
        (
            lambda m, g: zero3.linear_cross_entropy(torch.ones(2, 32, dtype=torch.float64), m.lm_head, torch.zeros(2).long()),
            r'"sum".*zero3\.backward',
        ),
        (lambda m, g: m(**part_of(m, use_cache=True)), "use_cache"),
        (lambda m, g: m(**part_of(m, position_ids=torch.zeros(3, 2, 4).long())), "position_ids"),
        (lambda m, g: m(**part_of(m, attention_mask=torch.ones(2, 1, 4, 4))), "attention_mask"),
        (lambda m, g: m.generate(batch(0, 4)["input_ids"]), "resident"),
        (lambda m, g: zero3.split_sequence(m, batch(g.rank, 4)), "differ|different"),
        (lambda m, g: zero3.split_sequence(m, {"labels": batch(0, 4)["labels"]}), "input_ids"),
        (lambda m, g: m(input_ids=batch(0, 4, rows=1 + g.rank)["input_ids"]), "rows"),
        (lambda m, g: m(**part_of(m, use_cache=g.rank == 1)), "use_cache|refused its part"),
    ],
)  # fmt: skip
def test_parts_refuse_wrong_calls(call: Any, match: str) -> None:
    refused(made, call, match)


def wrapping() -> Any:
    """Of a forward that passes on what it has no name for."""
    model = made()
    plain = type(model).forward

    def forward(self: Any, input_ids: Any = None, *rest: Any, **named: Any) -> Any:
        return plain(self, input_ids, *rest, **named)

    model.__class__ = type("Wrapping", (type(model),), {"forward": forward})
    return model


def test_arguments_without_names_are_read_by_their_names_or_refused() -> None:
    """None of them is dropped: here a mask and labels."""
    ids, mask = batch(0, 4)["input_ids"], torch.ones(2, 4, dtype=torch.int64)
    refused(wrapping, lambda m, g: m(ids, mask), "by name")
    refused(made, lambda m, g: m(ids, mask, None, None, None, ids), "split_sequence")


def test_a_model_of_ones_own_that_is_called_without_a_part_is_refused() -> None:
    refused(own, lambda m, g: m(torch.tensor([1, 2])), r"without a tensor \[B, part, \.\.\.\]")


SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (lambda: t.LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (lambda: t.Phi3Config(**SMALL, rope_parameters=LONG, original_max_position_embeddings=8), "longrope"),
        (lambda: t.RobertaConfig(**SMALL, is_decoder=True), "positions"),
        (lambda: t.OPTConfig(vocab_size=61, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4), "positions"),
        (lambda: t.FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True), "alibi"),
        (lambda: t.Qwen3NextConfig(**SMALL, num_experts=2, layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (lambda: t.Llama4TextConfig(**SMALL, num_local_experts=2, layer_types=["chunked_attention"] * 2), "chunks"),
    ],
)
def test_models_that_count_in_their_part_are_refused(config: Any, match: str) -> None:
    """Each of them would compute other numbers with a part of a sequence than with the whole."""
    model = t.AutoModelForCausalLM.from_config(config())
    with pytest.raises(ValueError, match=match):
        check_model(model, 2)
    check_model(made(), 2)


def attention_with(name: str, module: nn.Module) -> Any:
    """Beside its linear layers."""
    model = made()
    model.model.layers[1].self_attn.add_module(name, module)
    return model


def with_config(**changes: Any) -> Any:
    model = made()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def with_a(name: str) -> Any:
    """A module of a class of that name."""
    model = made()
    model.model.add_module("other", type(name, (nn.Module,), {})())
    return model


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: attention_with("mix", nn.Conv1d(8, 8, 2)), r"'model\.layers\.1\.self_attn' mixes .*Conv1d"),
        (lambda: attention_with("relative_attention_bias", nn.Embedding(4, 4)), r"'model\.layers\.1\.self_attn' has position biases"),
        (lambda: with_config(position_embedding_type="alibi"), "alibi"),
        (lambda: with_a("SomeIndexer"), "indexer"),
        (lambda: with_a("SomeGatedDeltaNet"), "SomeGatedDeltaNet goes from token to token"),
        *(
            (lambda kind=kind: with_config(layer_types=["full_attention", kind]), f"{kind} goes from token to token")
            for kind in ("linear_attention", "mamba", "recurrent", "conv", "ssm", "hybrid")
        ),
        (lambda: with_config(rope_parameters={"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}), "dynamic"),
        (lambda: with_config(rope_parameters={"type": "longrope"}), "longrope"),
    ],
)
def test_what_sees_more_than_a_part_is_refused(model: Any, match: str) -> None:
    """Wherever it stands in a model that is divided without it."""
    with pytest.raises(ValueError, match=match):
        check_model(model(), 2)


def test_an_attention_of_the_registry_sees_its_own_name() -> None:
    """Inside of parts and outside of them: some look a kernel up by it."""
    names = []

    def mine(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        names.append((module.config._attn_implementation, module.num_key_value_groups, module.training))
        return t.AttentionInterface()["sdpa"](module, query, key, value, mask, **kw)

    t.AttentionInterface.register("mine", mine)
    t.AttentionMaskInterface.register("mine", t.AttentionMaskInterface()["sdpa"])
    models = [made(attention="mine") for _ in range(2)]

    def body(group: Any) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        model(**part_of(model))
        with zero3.resident(model), torch.no_grad():
            model(input_ids=batch(0, 4)["input_ids"])

    run_parts(1, 2, body)
    assert {name for name, *_ in names} == {"mine"} and len(names) == 2 * 2 * 2


def test_an_attention_gets_positions_of_whole_sequences_where_the_model_gives_it_any() -> None:
    """As in one plain process: here the second block gives none."""
    found = list[Any]()

    def asked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
        found.append((module.layer_idx, kw.get("position_ids")))
        return t.AttentionInterface()["sdpa"](module, query, key, value, mask, **kw)

    def model() -> Any:
        model = made(attention="asked")
        model.model.layers[1].self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {name: value for name, value in kwargs.items() if name != "position_ids"}), with_kwargs=True
        )
        return model

    t.AttentionInterface.register("asked", asked)
    t.AttentionMaskInterface.register("asked", t.AttentionMaskInterface()["sdpa"])
    models = [model() for _ in range(2)]
    model()(input_ids=batch(0, 9)["input_ids"], use_cache=False)
    (_, whole), (_, none) = found
    assert whole.tolist() == [list(range(9))] and none is None
    found.clear()

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group)
        part = zero3.split_sequence(mine, batch(0, 9))
        mine(input_ids=part["input_ids"], position_ids=part["position_ids"])

    run_parts(1, 2, body)
    assert len(found) == 4
    assert all(torch.equal(given, whole.expand_as(given)) if layer == 0 else given is None for layer, given in found)


def test_an_attention_that_is_registered_after_the_model_was_sharded_is_called() -> None:
    """In the place of the one before; under another name, nobody exchanges."""
    calls = []

    def later(module: Any, *args: Any, **kw: Any) -> Any:
        calls.append(module.config._attn_implementation)
        return t.AttentionInterface()["sdpa"](module, *args, **kw)

    def body(group: Any) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        group.exchange(b"", torch.device("cpu"))
        t.AttentionInterface.register("changing", later)
        model(**part_of(model))
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match=r"self_attn.*attend"):
            model(**part_of(model))

    for registry in (t.AttentionInterface, t.AttentionMaskInterface):
        registry.register("changing", registry()["sdpa"])
    models = [made(attention="changing") for _ in range(2)]
    run_parts(1, 2, body)
    assert calls == ["changing"] * 2 * 2


def test_a_batch_that_was_cut_is_refused_inside_of_resident() -> None:
    def call(mine: Any, group: Any) -> None:
        part = part_of(mine)
        with zero3.resident(mine), torch.no_grad():
            again = zero3.split_sequence(mine, batch(0, 8))
            assert again["input_ids"].shape[1] == 8
            mine(input_ids=again["input_ids"], position_ids=again["position_ids"] + 3)  # as after padding
            mine.generate(batch(0, 4 + group.rank)["input_ids"], max_new_tokens=1 + group.rank, do_sample=False)
            part.pop("shift_labels")
            mine(**part)

    refused(made, call, "cut outside")


def test_attention_that_exchanges_nothing_is_an_error() -> None:
    refused(lambda: own("alone"), lambda m, g: m(batch(0, 4)["input_ids"]), "attend", RuntimeError)


class HybridAttention(nn.Module):
    """Of a text model, but beside the registry."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.out = config, nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.out(hidden_states.cumsum(1)), None


def hybrid() -> Any:
    model = made()
    model.model.layers[1].self_attn = HybridAttention(model.config).double()
    return model


def test_an_attention_that_does_not_exchange_is_named_if_others_do() -> None:
    refused(
        hybrid, lambda m, g: m(**{k: v for k, v in part_of(m).items() if k != "shift_labels"}), "layers.1.self_attn.*attend", RuntimeError
    )


def gptoss() -> Any:
    return t.GptOssForCausalLM(
        t.GptOssConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            vocab_size=WORDS, num_local_experts=2,
        )
    )  # fmt: skip


def encoder_decoder() -> Any:
    return t.T5ForConditionalGeneration(t.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=WORDS))


def recurrent() -> Any:
    return t.MambaForCausalLM(t.MambaConfig(hidden_size=8, state_size=4, num_hidden_layers=1, vocab_size=WORDS))


def bloom() -> Any:
    return t.BloomForCausalLM(t.BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=WORDS))


@pytest.mark.parametrize(
    ("model", "policy", "match"),
    [
        (lambda: made(heads=3, keys=3), {}, "2 ranks .* 3 query heads"),
        (gptoss, {}, "sinks"),
        (encoder_decoder, {}, "encoder-decoder"),
        (recurrent, {}, "Mamba"),
        (bloom, {}, "registry"),
        (made, {"dynamic": True}, "dynamic.*sp"),
    ],
)
def test_models_and_policies_that_cannot_divide_sequences_are_refused(model: Any, policy: dict[str, Any], match: str) -> None:
    models = [model() for _ in range(2)]

    def body(group: Any) -> None:
        before = [id(module) for module in models[group.rank].modules()]
        with pytest.raises(ValueError, match=match):
            zero3.shard(models[group.rank], process_group=group, policy=zero3.ShardingPolicy(**policy))
        assert [id(module) for module in models[group.rank].modules()] == before and not zero3.is_sharded(models[group.rank])

    run_parts(1, 2, body)


def test_a_layer_alone_is_refused() -> None:
    def body(group: Any) -> None:
        with pytest.raises(ValueError, match=r"zero3\.shard"):
            zero3.Zero3Layer(nn.Linear(2, 2), process_group=group)

    run_parts(1, 2, body)


# -- with others


@pytest.mark.parametrize("where", ["before", "block", "backward"])
def test_step_guard_drops_a_micro_batch_on_all_ranks(where: str) -> None:
    """The failed rank answers with zeros; the next step is right."""
    models, plain = [made() for _ in range(2)], made()
    for number in (0, 1, 3):
        plain.zero_grad()
        plain_step(plain, [batch(0, 9 + number, step=number)])

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group)
        for number in range(4):
            mine.zero_grad()
            whole = batch(0, 9 + number, step=number)
            fails = number == 2 and group.rank == 1
            with zero3.step_guard(mine) as guard:
                part = zero3.split_sequence(mine, whole)
                hooked: Any = None
                if fails and where == "before":
                    raise FloatingPointError("no batch")
                if fails and where == "block":
                    hooked = mine.model.layers[1].mlp.register_forward_pre_hook(fail)
                try:
                    loss = zero3.causal_lm_loss(mine, reduction="sum", **part)
                    if fails and where == "backward":
                        loss.register_hook(fail)
                    zero3.backward(loss, (part["shift_labels"] != -100).sum(), mine)
                finally:
                    if hooked is not None:
                        hooked.remove()
            assert guard.failed == (number == 2), number
            if number == 2:
                assert all(chunk.grad is None for chunk in zero3.get_trainable_chunk(mine))
        assert_gradients(mine, plain)

    run_parts(1, 2, body)


def fail(*_: Any) -> None:
    raise FloatingPointError("on purpose")


@pytest.mark.parametrize("together", [True, False])
def test_joinable_ranks_of_a_group_run_out_together(together: bool) -> None:
    models, plain = [made() for _ in range(4)], made()
    plain_step(plain, [batch(0, 9, step=1)])

    def steps_of(rank: int) -> int:
        return 2 if rank < 2 or (not together and rank == 3) else 1

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group)

        def run() -> None:
            with Join([zero3.joinable(mine, lambda: None)]):
                for number in range(steps_of(group.rank)):
                    mine.zero_grad()
                    step(mine, batch(group.rank // 2, 9, step=number))

        if together:
            run()
            assert_gradients(mine, plain)
            for number in range(4):  # ranks have exchanged different numbers of times, and nobody takes offence
                step(mine, batch(group.rank // 2, 9, step=number))
        else:
            with pytest.raises(ValueError, match="no data left"):
                run()

    with on_threads():
        run_parts(2, 2, body)
