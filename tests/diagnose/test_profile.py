"""zero3.profile: tells who was waited for and how long, adds nothing to steps that are not profiled, changes no numbers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import zero3
from tests.support.inside import states_of
from tests.support.live import LonelyCommunicator
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from zero3.comm import streams
from zero3.diagnose import timeline
from zero3.diagnose.timeline import LayerProfile, Profile, Span, Transfer

RANKS, LAYERS, WIDTH = 2, 4, 8
DELAY = 0.03


class Clock:
    """Time passes as a test says, and by a microsecond whenever somebody looks: a busy machine makes nobody wait longer."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "perf_counter", Clock())


class _Slow:
    def __init__(self, pending: Any, delay: float) -> None:
        self._pending, self._delay = pending, delay

    def wait(self) -> None:
        streams.perf_counter.now += self._delay  # type: ignore[attr-defined]
        self._delay = 0.0
        self._pending.wait()


class SlowCommunicator(LonelyCommunicator):
    """Whoever waits for a transfer of layer number `slow` waits for DELAY seconds of the clock."""

    channel = 0

    def __init__(self, slow: Callable[[str, int], bool]) -> None:
        super().__init__(RANKS)
        self._slow = slow

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Any = None) -> _Slow:
        return _Slow(super().all_gather(full, shard), DELAY * self._slow("fetch", full.numel()))

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Any = None) -> _Slow:
        return _Slow(super().reduce_scatter(shard, full), DELAY * self._slow("backup", full.numel()))


def numel(index: int) -> int:
    return WIDTH * (WIDTH + 2 * index) * 2  # each layer has a length of its own, by which the communicator knows it


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 2 * index, bias=False)
        self.down = nn.Linear(WIDTH + 2 * index, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def build(slow: Callable[[str, int], bool] = lambda kind, numel: False, **policy: Any) -> zero3.Zero3Sequential:
    torch.manual_seed(0)
    group, chosen = SlowCommunicator(slow), zero3.ShardingPolicy(**policy)
    return zero3.Zero3Sequential([zero3.Zero3Layer(Layer(i), policy=chosen, process_group=group) for i in range(LAYERS)])


def step(model: nn.Module) -> Tensor:
    loss = model(torch.ones(3, WIDTH)).square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", ["fetch", "backup"])
def test_the_layer_that_is_waited_for_is_named(kind: str) -> None:
    trailers = RANKS * 2 if kind == "backup" else 0  # an element for each of its parameters, behind each slice
    model = build(lambda what, length: what == kind and length == numel(2) + trailers)
    step(model)
    with zero3.profile(model) as found:
        step(model)
    waits = {layer.label: (layer.fetch_wait_ms, layer.backup_wait_ms) for layer in found.layers}
    assert list(waits) == [f"layer '{i}' (Layer)" for i in range(LAYERS)]
    times = 2 if kind == "fetch" else 1  # fetched in forward and in backward
    own = waits.pop("layer '2' (Layer)")
    assert own[kind == "backup"] >= 1e3 * DELAY * times
    assert own[kind == "fetch"] < 1e3 * DELAY
    assert max(max(each) for each in waits.values()) < 1e3 * DELAY
    assert found.exposed_ms == pytest.approx(sum(own) + sum(map(sum, waits.values())))
    times = [(span.begin, span.end) for span in found.spans] + [(t.stopped, t.resumed) for t in found.transfers]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(times))), "who waits does not compute"
    assert any("layer '2' (Layer) alone" in line and "split it" in line for line in found.advice)


def test_transfers_and_their_bytes_are_those_of_the_formula() -> None:
    model = build()
    with zero3.profile(model) as found:
        step(model)
        step(model)
    last = LAYERS - 1  # kept between forward and backward: gathered once
    for index, layer in enumerate(found.layers):
        fetches = 1 if index == last else 2
        assert (layer.fetches, layer.backups) == (2 * fetches, 2)
        assert layer.nbytes == 2 * (fetches + 1) * numel(index) // RANKS * 4
    assert found.nbytes == sum(layer.nbytes for layer in found.layers)
    assert found.bytes_per_second > 0
    computed = [key for key, _ in groupby(found.spans, lambda span: (span.phase, span.layer))]  # a wait cuts a span in two
    for number in range(2):  # of each step: forward in order, backward the other way
        phases, layers = zip(*computed[2 * LAYERS * number :][: 2 * LAYERS], strict=True)
        assert phases == ("forward",) * LAYERS + ("backward",) * LAYERS
        assert layers[:LAYERS] == layers[LAYERS:][::-1]
    assert len(computed) == 4 * LAYERS
    ends = [span.end for span in found.spans]
    assert all(begin >= end for begin, end in zip([span.begin for span in found.spans][1:], ends, strict=False)), "one at a time"


def test_smaller_dtypes_are_fewer_bytes() -> None:
    model = build(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with zero3.profile(model) as found:
        step(model)
    assert found.layers[0].nbytes == numel(0) // RANKS * (2 + 2 + 4)


@pytest.mark.parametrize("policy", [{"param_dtype": torch.bfloat16}, {"gather_format": zero3.Int8()}, {}])
def test_full_params_counts_the_bytes_of_exact_values(policy: dict[str, Any]) -> None:
    """A step after it counts its own again."""

    def body(group: ThreadCommunicator) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        zero3.shard(model, nn.Linear, process_group=group, policy=zero3.ShardingPolicy(**policy))
        group.log.clear()
        with zero3.profile(model) as found:
            with zero3.full_params(model):
                pass
            model(torch.ones(2, 64))
        gathers = [each for each in group.log if each.kind == "all_gather"]
        return found.nbytes, sum(each.numel * each.dtype.itemsize for each in gathers) // 2

    for told, moved in run_ranks(2, body):
        assert told == moved


def test_what_travels_in_a_format_counts_the_bytes_of_the_format() -> None:
    """A chunk that is frozen travels as it is."""

    def body(group: ThreadCommunicator) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False).requires_grad_(number != 1) for number in range(3)))
        formats = zero3.ShardingPolicy(gather_format=zero3.Float8(), reduce_format=zero3.Int8())
        zero3.shard(model, nn.Linear, process_group=group, policy=formats)
        model(torch.ones(2, 64)).sum().backward()
        group.log.clear()
        with zero3.profile(model) as found:
            model(torch.ones(2, 64)).sum().backward()
        whole = [each.numel * each.dtype.itemsize for each in group.log if each.kind in ("all_gather", "all_to_all")]
        return found.nbytes, sum(whole) * 2 // 3

    for told, moved in run_ranks(3, body):
        assert told == pytest.approx(moved, rel=0.01)  # without the trailers of gradients


def test_sums_over_replicas_of_what_came_in_a_format_are_float32() -> None:
    def body(group: ThreadMesh) -> int:
        model = zero3.Zero3Layer(
            nn.Linear(64, 64, bias=False),
            process_group=group,
            policy=zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_format=zero3.Int8()),
        )
        with zero3.profile(model) as found:
            model(torch.ones(2, 64)).sum().backward()
        gathered, reduced = (each.nbytes for each in sorted(found.transfers, key=lambda each: each.kind == "backup")[:2])
        return found.nbytes - gathered - reduced

    assert run_mesh(2, 2, body) == [64 * 64 // 2 * 4] * 4


@pytest.mark.parametrize("how", ["models", "layers"])
def test_layers_of_one_name_have_lines_of_their_own(how: str) -> None:
    """Those of several models, and those that were wrapped by hand and know no place."""

    def body(group: ThreadCommunicator) -> list[tuple[str, int]]:
        def sharded() -> nn.Module:
            return zero3.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear, process_group=group)

        model = nn.ModuleDict({"a": sharded(), "b": sharded()})
        if how == "layers":
            model = nn.ModuleDict({name: zero3.Zero3Layer(nn.Linear(8, 8), process_group=group) for name in "ab"})
        with zero3.profile(model) as found:
            model["b"](model["a"](torch.ones(2, 8))).sum().backward()
        return [(layer.label, layer.backups) for layer in found.layers if "root" not in layer.label]

    layers = [(f"layer Linear at '{name}'", 1) for name in "ab"]
    models = [(f"layer '{number}' (Linear) at '{name}.{number}'", 1) for name in "ab" for number in range(2)]
    assert run_ranks(2, body) == [models if how == "models" else layers] * 2


def test_nothing_is_left_behind_and_nothing_is_changed() -> None:
    def parts(model: nn.Module) -> list[set[str]]:
        hooks = [set(map(str, m._forward_hooks)) | set(map(str, m._forward_pre_hooks)) for m in model.modules()]
        owners = [o for s in states_of(model) for o in (s, s.gradients, *s.chunks)]
        return hooks + [set(vars(owner)) for owner in owners]

    profiled, other = build(), build()
    step(profiled), step(other)
    before = parts(profiled)
    with zero3.profile(profiled):
        profiled_loss = step(profiled)
        with pytest.raises(RuntimeError, match="is being profiled already"), zero3.profile(profiled):
            pass
        assert parts(profiled) != before
    assert parts(profiled) == before
    with pytest.raises(KeyError), zero3.profile(profiled):
        raise KeyError
    assert parts(profiled) == before
    assert torch.equal(profiled_loss, step(other))
    for one, two in zip(profiled.get_trainable_chunk(), other.get_trainable_chunk(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_an_exception_in_a_layer_passes_through() -> None:
    model = build()
    with zero3.profile(model) as found:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, WIDTH + 1))
        step(model)
    computed = dict.fromkeys((span.phase, span.layer) for span in found.spans)
    assert [phase for phase, _ in computed].count("backward") == LAYERS


def test_a_sharded_model_with_a_root_and_recomputation() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Layer(i) for i in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False))

    model = zero3.shard(Model(), process_group=SlowCommunicator(lambda kind, length: False))
    with zero3.profile(model) as found:
        step(model)
    assert {layer.label for layer in found.layers} == {f"layer 'blocks.{i}' (Layer)" for i in range(LAYERS)} | {"layer the root (Model)"}
    forward = [span.layer for span in found.spans if span.phase == "forward"]
    assert forward[0] == forward[-1] == "layer the root (Model)", "before the first block, and after the last"


def test_ranks_take_profiles_of_their_own() -> None:
    def body(communicator: ThreadCommunicator) -> list[tuple[int, int, int]]:
        communicator.channel = 0
        layers = [zero3.Zero3Layer(Layer(i), process_group=communicator) for i in range(LAYERS)]
        model = zero3.Zero3Sequential(layers)
        step(model)
        if communicator.rank:  # alone: it adds no collectives
            step(model)
            return []
        with zero3.profile(model) as found:
            step(model)
        return [(layer.fetches, layer.backups, layer.nbytes) for layer in found.layers]

    assert run_ranks(2, body)[0] == [(1 + (i < LAYERS - 1), 1, (2 + (i < LAYERS - 1)) * numel(i) // 2 * 4) for i in range(LAYERS)]


def test_one_rank_has_no_transfers() -> None:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(Layer(i)) for i in range(LAYERS)])
    with zero3.profile(model) as found:
        step(model)
    assert not found.transfers and not found.advice and found.bytes_per_second == 0
    assert len(found.spans) == 2 * LAYERS


def test_an_unsharded_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is sharded"), zero3.profile(nn.Linear(2, 2)):
        pass


def test_torchs_profiler_sees_the_layers_names() -> None:
    model = build()
    step(model)
    with torch.profiler.profile() as seen, zero3.profile(model):
        step(model)
    names = {event.key for event in seen.key_averages()}
    for what in ("forward", "fetch", "wait", "backup", "release"):
        assert f"zero3::{what} layer '1' (Layer)" in names


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = build(lambda kind, length: length == numel(1))
    with zero3.profile(model) as found:
        step(model)
    found.draw(tmp_path / "step.png")
    found.draw(tmp_path / "part.svg", begin=0.0, end=found.seconds / 2)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "compute" in (tmp_path / "part.svg").read_text() or (tmp_path / "part.svg").stat().st_size > 1000


def made_up(transfers: list[Transfer], seconds: float) -> Profile:
    found = Profile()
    found._finish(seconds, [Span("a", "forward", 0.0, 1.0)], transfers, prefetch_depth=1)
    return found


def transfer(layer: str, begin: float, end: float, wait: float) -> Transfer:
    return Transfer(layer, "fetch", "forward", 1000, begin, end, end - wait, end)


def test_sums_and_advice() -> None:
    hidden = made_up([transfer("a", 0.0, 1.0, 0.01)], 2.0)
    assert hidden.advice == []
    assert hidden.bytes_per_second == pytest.approx(1000)
    assert hidden.layers == [LayerProfile("a", 1e3, 1, pytest.approx(10.0), 0, 0.0, 1000)]
    bursty = made_up([transfer(name, at, at + 0.1, 0.1) for at, name in enumerate("abcd")], 4.0)
    assert "prefetch_depth=2" in bursty.advice[0]
    bound = made_up([transfer(name, at, at + 1.0, 0.9) for at, name in enumerate("abcd")], 4.0)
    assert "the link is the limit" in bound.advice[0]
    overlapping = made_up([transfer("a", 0.0, 1.0, 0.5), transfer("b", 0.5, 1.5, 0.5)], 2.0)
    assert overlapping.bytes_per_second == pytest.approx(2000 / 1.5), "time that two share counts once"
    assert "2.0" in str(overlapping) and "0.0 MB" in str(overlapping)


def test_the_pictures_bars_are_as_long_as_what_they_show_and_hold_its_numbers() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    model = build(lambda kind, length: length == numel(1))
    with zero3.profile(model) as found:
        step(model)
    axes = figure.subplots()
    timeline._draw(axes, found, 0.0, found.seconds)
    bars = [path.get_extents() for bar in axes.collections for path in bar.get_paths()]
    for found_there in (*found.spans, *found.transfers):
        assert any(box.intervalx.tolist() == pytest.approx([1e3 * found_there.begin, 1e3 * found_there.end]) for box in bars)
    texts = [text.get_position() for text in axes.texts]
    assert texts and all(any(box.x0 <= x <= box.x1 and box.y0 <= y <= box.y1 for box in bars) for x, y in texts)


def test_a_picture_of_a_part_shows_that_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    shown: list[tuple[float, float]] = []
    draw = timeline._draw
    monkeypatch.setattr(
        timeline, "_draw", lambda axes, profile, begin, end: (draw(axes, profile, begin, end), shown.append(axes.get_xlim()))
    )
    model = build()
    with zero3.profile(model) as found:
        step(model)
    found.draw(tmp_path / "all.svg")
    found.draw(tmp_path / "part.svg", begin=0.25 * found.seconds, end=0.5 * found.seconds)
    assert shown == [pytest.approx((0.0, 1e3 * found.seconds)), pytest.approx((250 * found.seconds, 500 * found.seconds))]


def test_lanes_are_ended_before_a_model_that_was_first_run_in_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are wrapped there when its runtime is made."""
    from zero3.diagnose.profile import _Recorder, _TimedLane

    ended: list[Any] = []
    monkeypatch.setattr(streams.StreamLane, "join", lambda lane: ended.append(lane))
    lane, recorder = object.__new__(streams.StreamLane), _Recorder(streams.clock_for(torch.device("cpu")))
    owner = nn.Identity()
    streams.Lanes(*(_TimedLane(name, lane, recorder) for name in ("fetch", "backup"))).end_before(owner)
    del owner
    assert ended == [lane, lane]


def test_a_profile_of_a_part_leaves_no_layer_timed() -> None:
    """Its runtime is made inside, of layers that the profile was not given, too."""

    def body(group: ThreadCommunicator) -> None:
        model = zero3.Zero3Sequential([zero3.Zero3Layer(nn.Linear(WIDTH, WIDTH), process_group=group) for _ in range(3)])
        with zero3.profile(model[0]):
            model(torch.ones(1, WIDTH)).sum().backward()
        assert not [lane for state in states_of(model) for lane in state.chunks.lanes if hasattr(lane, "inner")]

    run_ranks(RANKS, body)
