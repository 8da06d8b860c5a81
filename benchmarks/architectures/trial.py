"""What one class is tried on, by each rank: whatever plain torch and transformers do, done sharded, and compared."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import zero3
from zero3.experts.finding import is_experts

from .inputs import find_inputs, loss_of
from .tiny import model_types, tiny_config

STEPS, LENGTH = 2, 0.1  # of training, and of a step at most
MOST = 15e6  # parameters: more are too many for a quick look


class PlainFails(Exception):
    """The unsharded model can't do it either."""


class DoesNotApply(Exception):
    """The class has no such thing."""


class Differs(Exception):
    """Sharded and plain disagree."""


class Subject:
    """One class with a small configuration, and what it is called with."""

    def __init__(self, kind: str) -> None:
        self.task, name = model_types()[kind]
        self.config = tiny_config(kind)
        self.kind: Any = getattr(transformers, name)
        with torch.device("meta"):
            numel = sum(parameter.numel() for parameter in self.kind(self.config).parameters())
        if numel > MOST:
            raise PlainFails(f"{numel / 1e6:.0f} M parameters are too many")
        self.dtype = torch.float32
        self._inputs = find_inputs(self.model(), self.task)

    def inputs(self, seed: int) -> dict[str, Any]:
        found = self._inputs(seed)
        return {k: v.to(self.dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in found.items()}

    def model(self) -> Any:
        """The same weights at every call; without dropout."""
        torch.manual_seed(0)
        model = self.kind(copy.deepcopy(self.config))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.to(self.dtype).train()


Build = Callable[[], Any]


def _plain(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        raise PlainFails(f"{type(error).__name__}: {error}") from error


def _train(subject: Subject, build: Build, **policy: Any) -> None:
    """In float32; where that differs on any rank in float64, in which rounding explains nothing."""
    chosen = zero3.ShardingPolicy(**policy)
    first = _told(lambda: _train_in(subject, build, 1.0, chosen))
    if first is None:
        return
    subject.dtype = torch.float64
    try:
        second = _told(lambda: _train_in(subject, build, 1e-6, chosen))
    except PlainFails:  # some kernels know no float64
        raise first from None
    finally:
        subject.dtype = torch.float32
    if second is not None:
        raise second


def _told(action: Callable[[], None]) -> Differs | None:
    """How it differs here, or that it does so on another rank."""
    found: Differs | None = None
    try:
        action()
    except Differs as caught:
        found = caught
    flag = torch.tensor(float(found is not None))
    dist.all_reduce(flag)
    return found if found is not None or not flag else Differs("on another rank")


def _train_in(subject: Subject, build: Build, share: float, policy: zero3.ShardingPolicy) -> None:
    """Two steps of SGD: losses and changes of parameters are those of copies whose gradients are averaged. `share`: of the tolerance."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = _plain(lambda: _PlainTraining(subject, [build() for _ in range(size)]))
    model = zero3.shard(build(), policy=policy)
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=plain.rate)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, subject.inputs(size * step + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with zero3.full_params(model):
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step, loss in enumerate(losses):  # only now: the other ranks may find that nothing differs, and go on
        expected = plain.losses[step][rank]
        _compare(f"the loss of step {step}", loss, expected, share * (1e-4 * expected.abs().item() + 1e-6))
    if list(found) != list(plain.after):
        raise Differs("the names of parameters")
    for name, value in plain.after.items():
        change = (value - plain.before[name]).abs().nan_to_num()
        largest, values = (each.max().item() if each.numel() else 0.0 for each in (change, value.abs().nan_to_num()))
        allowed = 4e-3 * largest + 1e-5 * plain.rate + 2e-7 * values
        _compare(f"{name} after {STEPS} steps", found[name], value, share * allowed)


class _PlainTraining:
    """Copies of a model, one a rank, each with its rank's inputs; their gradients are averaged. No step is longer than 0.1."""

    def __init__(self, subject: Subject, models: list[nn.Module]) -> None:
        self.before = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
        self.losses: list[list[Tensor]] = []
        self.rate = 0.0
        for step in range(STEPS):
            losses = [loss_of(model, subject.inputs(len(models) * step + rank)) for rank, model in enumerate(models)]
            for loss in losses:
                loss.backward()
            self.losses.append([loss.detach() for loss in losses])
            self._step(models)
        self.after = {name: parameter.detach() for name, parameter in models[0].named_parameters()}

    def _step(self, models: list[nn.Module]) -> None:
        means = []
        for copies in zip(*(model.parameters() for model in models), strict=True):
            gradients = [parameter.grad for parameter in copies if parameter.grad is not None]
            means.append((copies, sum(gradients[1:], gradients[0].clone()) / len(models) if gradients else None))
        norm = torch.stack([mean.norm() for _, mean in means if mean is not None]).norm().nan_to_num().item()
        self.rate = self.rate or LENGTH / max(1.0, norm)
        for copies, mean in means:
            for parameter in copies if mean is not None else ():
                parameter.data -= self.rate * mean
                parameter.grad = None


def _compare(what: str, found: Tensor, expected: Tensor, allowed: float) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Differs(f"{what}: {tuple(found.shape)} {found.dtype}, expected {tuple(expected.shape)} {expected.dtype}")
    if not torch.allclose(found, expected, rtol=0, atol=allowed, equal_nan=True):
        raise Differs(f"{what}: off by {(found - expected).abs().max().item():.2g}, allowed {allowed:.2g}")


# -- the checks


def step(subject: Subject) -> None:
    _train(subject, subject.model)


def experts(subject: Subject) -> None:
    """At home."""
    if not any(map(is_experts, subject.model().modules())):
        raise DoesNotApply
    _train(subject, subject.model, expert_parallel=True)


def checkpointing(subject: Subject) -> None:
    if not subject.kind.supports_gradient_checkpointing:
        raise DoesNotApply

    def build() -> Any:
        model = subject.model()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    _train(subject, build)


def lora(subject: Subject) -> None:
    import peft

    def build() -> Any:
        model = subject.model()
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))

    _train(subject, build)


def generate(subject: Subject) -> None:
    """Inside `resident`, and in plain calls."""
    if not subject.kind.can_generate():
        raise DoesNotApply
    prompt = {k: v for k, v in subject.inputs(dist.get_rank()).items() if k not in ("labels", "decoder_input_ids", "use_cache")}
    together = {k: v for k, v in subject.inputs(0).items() if k in prompt}
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    plain = subject.model().eval()
    expected = [_plain(lambda inputs=inputs: plain.generate(**inputs, **options)) for inputs in (prompt, together)]
    model = zero3.shard(subject.model()).eval()
    with zero3.resident(model):
        alone = model.generate(**prompt, **options)
    for what, found, wanted in (("resident", alone, expected[0]), ("a plain call", model.generate(**together, **options), expected[1])):
        found, wanted = (getattr(each, "sequences", each) for each in (found, wanted))
        if isinstance(found, Tensor) and not torch.equal(found, wanted):
            raise Differs(f"in {what}: {found.tolist()}, expected {wanted.tolist()}"[:200])


def load(subject: Subject) -> None:
    """From what transformers wrote, onto the meta device; what it computes then shows that buffers have values too."""
    plain = subject.model().eval()
    folder = _shared_folder()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    _plain(lambda: subject.kind.from_pretrained(folder))
    with torch.device("meta"):
        empty = subject.kind(copy.deepcopy(subject.config))
    model = zero3.shard(empty, device="cpu").eval()
    zero3.load_pretrained(model, folder)
    _same_state(zero3.full_state_dict(model), plain.state_dict())
    with zero3.resident(model), torch.no_grad():
        inputs = subject.inputs(0)
        _compare("the loss", loss_of(model, inputs), _plain(lambda: loss_of(plain, inputs)), 1e-6)


def save(subject: Subject) -> None:
    """What transformers reads is the model, and the names are those that transformers writes."""
    model, plain = zero3.shard(subject.model()), subject.model()
    folder = _shared_folder()
    zero3.save_pretrained(model, folder)
    if dist.get_rank() == 0:
        theirs = tempfile.mkdtemp()
        _plain(lambda: plain.save_pretrained(theirs))
        ours, wanted = (_names(Path(each)) for each in (folder, theirs))
        if ours != wanted:
            raise Differs(f"names in files: {sorted(ours ^ wanted)[:4]}")
        _plain(lambda: subject.kind.from_pretrained(theirs))
        _same_state(subject.kind.from_pretrained(folder).state_dict(), plain.state_dict())


def _shared_folder() -> str:
    """Below the sweep's own temporary directory, which it removes."""
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    return str(folders[0])


def _names(folder: Path) -> set[str]:
    from safetensors import safe_open

    return {name for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()}  # noqa: SIM118  it is no dict


def _same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if dist.get_rank() != 0 and not found:
        return
    if list(found) != list(expected):
        raise Differs(f"names of the state: {sorted(set(found) ^ set(expected))[:4]}")
    for name, value in expected.items():
        _compare(name, found[name], value, 0.0)


CHECKS: dict[str, Callable[[Subject], None]] = {
    "step": step, "experts": experts, "checkpointing": checkpointing, "LoRA": lora, "generate": generate, "load": load, "save": save,
}  # fmt: skip


def outcome(subject: Subject, check: str) -> str:
    """`ok`, or what came in its place."""
    try:
        CHECKS[check](subject)
    except DoesNotApply:
        return "-"
    except PlainFails as error:
        return f"plain fails: {_short(error)}"
    except Differs as error:
        return f"differs: {_short(error)}"
    except Exception as error:
        return f"error: {type(error).__name__}: {_short(error)}"
    return "ok"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
