"""TRL with `use_vllm=True`, against stand-ins that store what they are sent: names and bits of save_pretrained and save_merged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import zero3
from tests.support.inside import presences
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import launched

trl = pytest.importorskip("trl")
from tests.integrations import test_trl as makers  # noqa: E402
from tests.support.engines import Server, vllm_stands_in  # noqa: E402


def files_in(directory: Path) -> dict[str, Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def trainer_with(kind: str, mode: str, lora: bool, rank: Rank, url: str | None, **options: Any) -> Any:
    how: dict[str, Any] = {"use_vllm": True, "vllm_mode": mode, "max_steps": 2, **options}
    how |= {"vllm_server_base_url": url, "vllm_group_port": int((rank.scratch / "port").read_text())} if mode == "server" else {}
    how |= {} if lora else {"beta": 0.0}  # a reference would be read from the model's directory
    directory = rank.scratch / "run"
    return makers.grpo(True, lora, directory, **how) if kind == "grpo" else makers.rloo(True, directory, lora=lora, **how)


def look(model: Any, looked: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"inside zero3\.parked"):
        zero3.full_state_dict(model)
    looked.append("once")


def served(rank: Rank) -> tuple[Server | None, str]:
    """Rank 0 has the server. All know its address."""
    server = None
    if rank.number == 0:
        server = Server()
        (rank.scratch / "url").write_text(f"http://127.0.0.1:{server.server_address[1]}")
        (rank.scratch / "port").write_text(str(server.channel.getsockname()[1]))
    torch.distributed.barrier()
    return server, (rank.scratch / "url").read_text()


def sync(rank: Rank, kind: str, mode: str, lora: bool, sleeps: bool) -> int:
    """Trains, and compares what the engine has after each synchronisation with what is saved then."""
    with launched(rank), vllm_stands_in():
        server, url = served(rank) if mode == "server" else (None, None)
        trainer = trainer_with(kind, mode, lora, rank, url, **({"vllm_enable_sleep_mode": True} if sleeps else {}))
        engine, count, looked = trainer.vllm_generation, 0, []
        synced = engine.sync_weights

        def watched() -> None:
            nonlocal count
            synced()
            count += 1
            directory = rank.scratch / f"saved {count}"
            (zero3.save_merged if lora else zero3.save_pretrained)(trainer.model, directory)
            expected = files_in(directory)
            if mode == "colocate" or server is not None:
                found = engine.llm.weights if server is None else server.weights
                assert found.keys() == expected.keys() and len(expected) > 10
                assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in expected.items())

        vars(engine).update(sync_weights=watched)
        if sleeps:
            engine.llm.looks = partial(look, trainer.model, looked)
        trainer.train()
        assert bool(looked) == sleeps
        assert "fetched" not in presences(trainer.model)
        if server is not None:
            server.end()
        return count


@pytest.mark.parametrize(
    ("kind", "mode", "lora", "sleeps"),
    [
        ("grpo", "server", False, False),
        pytest.param("grpo", "server", True, False, marks=pytest.mark.slow),
        pytest.param("grpo", "colocate", True, True, marks=pytest.mark.slow),
        pytest.param("grpo", "colocate", False, False, marks=pytest.mark.slow),
        pytest.param("rloo", "server", True, False, marks=pytest.mark.slow),
        pytest.param("rloo", "server", False, False, marks=pytest.mark.slow),
        pytest.param("rloo", "colocate", True, True, marks=pytest.mark.slow),
        pytest.param("rloo", "colocate", True, False, marks=pytest.mark.slow),
        pytest.param("grpo", "colocate", False, True, marks=pytest.mark.slow),
        ("rloo", "colocate", False, True),
    ],
)
def test_vllm_is_synchronised_by_names_and_bits_of_the_files(kind: str, mode: str, lora: bool, sleeps: bool) -> None:
    assert min(on_ranks(2, sync, kind, mode, lora, sleeps)) >= 2


def fail_in_server_mode(rank: Rank) -> str:
    """The server refuses: rank 0 raises its error, the other finishes and goes on, and the next synchronisation is right."""
    with launched(rank), vllm_stands_in():
        server, url = served(rank)
        engine = trainer_with("grpo", "server", False, rank, url).vllm_generation
        engine.sync_weights()
        if server is not None:
            server.fails = True
        found = ""
        try:
            engine.sync_weights()
        except Exception as error:  # of TRL's choice
            found = str(error)
        if server is not None:
            server.fails = False
        torch.distributed.barrier()
        engine.sync_weights()
        if server is not None:
            assert server.updates == 2 and len(server.weights) > 10
            server.end()
        return found


def test_a_server_that_refuses_is_an_error_of_the_rank_that_sends_alone() -> None:
    first, second = on_ranks(2, fail_in_server_mode)
    assert "400" in first or "out of memory" in first, first
    assert second == ""


def others(rank: Rank) -> list[str]:
    """What each rank asks the stream for, and has copied: who sends nothing takes part, and no more."""
    with launched(rank), vllm_stands_in():
        server, url = served(rank)
        trainer = trainer_with("grpo", "server", False, rank, url)
        made: list[str] = []
        weights = vars(trainer.vllm_generation)["_iter_named_params"]

        def seen() -> Any:
            for name, tensor in weights():
                made.append(name)
                yield name, tensor

        vars(trainer.vllm_generation)["_iter_named_params"] = seen
        trainer.vllm_generation.sync_weights()
        if server is not None:
            server.end()
        return made


def test_ranks_that_send_nothing_make_no_tensors() -> None:
    first, second = on_ranks(2, others)
    assert len(first) > 10 and second == []


def in_bf16(rank: Rank, lora: bool) -> set[str]:
    """The dtypes are those of the parameters: masters' in float32, whatever layers compute in."""
    with launched(rank), vllm_stands_in():
        engine = trainer_with("grpo", "colocate", lora, rank, None, bf16=True).vllm_generation
        engine.sync_weights()
        return {str(tensor.dtype) for tensor in engine.llm.weights.values()}


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_under_bf16_vllm_is_sent_the_parameters_own_dtypes(lora: bool) -> None:
    assert on_ranks(2, in_bf16, lora) == [{"torch.float32"}] * 2


class WithItsOwn(transformers.Trainer):
    """As TRL's OnlineDPOTrainer: it sends weights to an engine itself, parameter by parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_client = object()


def refused(rank: Rank) -> str:
    with (
        launched(rank),
        pytest.raises(ValueError, match="use_vllm=True: Zero3WithItsOwn sends weights to vLLM in a way of its own") as found,
    ):
        makers.with_mixin(WithItsOwn, True)(model=makers.model(), args=makers.arguments(rank.scratch, bf16=False))
    return str(found.value)


def test_trainers_that_send_weights_in_a_way_of_their_own_are_refused() -> None:
    assert all("vllm_generation" in text for text in on_ranks(2, refused))


def test_trl_has_trainers_with_an_engine_of_their_own_and_others_with_vllm_generation() -> None:
    """What the refusal looks at is what the installed TRL has."""
    home = Path(trl.__path__[0])
    files = ("trainer/grpo_trainer.py", "trainer/rloo_trainer.py", "experimental/online_dpo/online_dpo_trainer.py")
    found = {Path(file).stem: "self.vllm_generation" in (home / file).read_text() for file in files}
    assert found == {"grpo_trainer": True, "rloo_trainer": True, "online_dpo_trainer": False}


def fail(rank: Rank) -> str:
    with launched(rank), vllm_stands_in():
        trainer = trainer_with("grpo", "colocate", False, rank, None)
        engine = trainer.vllm_generation

        def full(named: list[Any]) -> None:
            raise MemoryError("the engine has no room")

        if rank.number == 1:
            engine.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights = full
        try:
            engine.sync_weights()
        except MemoryError as error:
            return str(error)
        assert len(engine.llm.weights) > 10
        return ""


def test_an_engine_that_raises_on_one_rank_leaves_the_others_their_weights() -> None:
    assert on_ranks(2, fail) == ["", "the engine has no room"]


def batch(rank: Rank) -> list[float]:
    """transformers' continuous batching, from TRL, in bf16: TRL's conversion changes no master."""
    how: dict[str, Any] = {"use_transformers_continuous_batching": True, "max_steps": 2, "bf16": True}
    how["transformers_continuous_batching_config"] = {"page_size": 32, "num_blocks": 16, "max_batch_tokens": 64}
    with launched(rank):
        trainer = makers.grpo(True, False, rank.scratch, **how)
        trainer.train()
        assert {chunk.dtype for chunk in zero3.get_trainable_chunk(trainer.model)} == {torch.float32}
        assert "fetched" not in presences(trainer.model)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trl_generates_by_continuous_batching() -> None:
    first, second = on_ranks(2, batch)
    assert first == second and len(first) == 2
