"""Every option of transformers' and TRL's configurations is right, refused by name, or does not touch sharding: see `options.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import arguments, launched, llama, logged, trainer_of

trl = pytest.importorskip("trl")

from tests.integrations import test_trl as makers  # noqa: E402
from tests.integrations.options import CONFIGS, NO_MATTER, REFUSED, RIGHT, Try, lines  # noqa: E402
from tests.support.chats import tokenizer  # noqa: E402

HERE = Path(__file__).parent
TRIES: dict[str, Try] = {}  # by the options that each is for
for tried in [each for about in RIGHT.values() if not isinstance(about.shown, str) for each in about.shown]:
    TRIES.setdefault(f"{tried.trainer}, {', '.join(f'{option}={value}' for option, value in tried.options.items())}", tried)
VALUES = [option for option, about in REFUSED.items() if not isinstance(about.shown, str)]


def test_every_option_is_in_the_table_once() -> None:
    """A new version of transformers or TRL that has a new option fails here: say what becomes of it."""
    kinds = [transformers.TrainingArguments, *(getattr(trl, name) for name in CONFIGS)]
    there = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    no_matter = [option for options in NO_MATTER.values() for option in options.split()]
    assert len(no_matter) == len(set(no_matter)) and not set(no_matter) & (RIGHT.keys() | REFUSED.keys())
    here = {*RIGHT, *REFUSED, *no_matter}
    assert (sorted(there - here), sorted(here - there)) == ([], [])


def test_each_option_that_is_right_is_among_those_that_are_tried() -> None:
    for option, about in RIGHT.items():
        assert isinstance(about.shown, str) or any(option in tried.options for tried in about.shown), option


def test_the_docs_have_the_table() -> None:
    assert "\n".join(lines()) in (HERE.parents[1] / "docs" / "integrations.md").read_text()


def test_the_tests_that_the_table_names_are_there() -> None:
    for about in (*RIGHT.values(), *REFUSED.values()):
        if isinstance(about.shown, str):
            file, _, name = about.shown.partition("::")
            assert f"def {name}(" in (HERE / file).read_text(), about.shown


def trained(rank: Rank, ours: bool, kind: str, options: dict[str, Any]) -> list[tuple[float, ...]]:
    given = {"max_steps": 3, "warmup_steps": 0, **options}
    with launched(rank):
        if given.get("chat_template_path"):
            words = tokenizer()
            words.add_tokens(["<more>"])
            given["chat_template_path"] = _written_once(rank, "words", words)
        if given.pop("by path", False):
            path = _written_once(rank, "model", makers.model())
            dtype = getattr(torch, given.pop("dtype", "float32"))
            given["given"] = path if kind == "sft" else transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        if kind == "Trainer":
            trainer = trainer_of(ours, llama(num_hidden_layers=2), rank.scratch, **given)
        else:
            lora = () if kind in ("kto", "reward", "rloo") else (False,)
            trainer = getattr(makers, kind)(ours, *lora, rank.scratch, **given)
        if ours and given.get("activation_offloading"):
            assert trainer.args.activation_offloading
            assert type(trainer.maybe_activation_offload_context) is type(zero3.offload_activations())
        trainer.train()
        assert zero3.is_sharded(trainer.model) == ours
        return logged(trainer, "loss", "grad_norm")


def _written_once(rank: Rank, name: str, what: Any) -> str:
    path = rank.scratch / name
    if rank.number == 0:
        what.save_pretrained(path)
    torch.distributed.barrier()
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIES)
def test_an_option_gives_what_it_gives_under_ddp(name: str) -> None:
    tried = TRIES[name]
    plain = tried.options if tried.plain is None else tried.plain
    expected = on_ranks(2, trained, False, tried.trainer, plain, debug="OFF")[0]
    found = on_ranks(2, trained, True, tried.trainer, tried.options)[0]
    assert len(expected) == 3 and np.ptp(expected, axis=0).any()
    assert np.allclose(found, expected, rtol=tried.rtol, atol=2e-5)


def refuse(rank: Rank, option: str) -> None:
    """As an argument that is there, for some can't be given here: transformers refuses them itself, or keeps them for the process."""
    from zero3.integrations.transformers import Zero3Trainer

    with launched(rank):
        chosen = arguments(rank.scratch)
        setattr(chosen, option, REFUSED[option].shown)
        with pytest.raises(ValueError, match=f"^{option}="):
            Zero3Trainer(model=llama(), args=chosen)


@pytest.mark.parametrize("option", VALUES)
def test_an_option_is_refused_by_name_when_the_trainer_is_made(option: str) -> None:
    on_ranks(1, refuse, option)
