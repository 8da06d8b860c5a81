"""Lives of models drawn at random, in schedules drawn at random. `make soak` draws thousands."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky

drawn = settings(max_examples=3, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["machines", "models"])
def test_any_life_in_any_order(kind: str) -> None:
    from tests.device import lives

    getattr(lives, kind)(drawn)


@pytest.mark.parametrize("kind", ["machines", "models"])
def test_a_missing_wait_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.device import lives
    from zero3.comm import streams

    monkeypatch.setattr(streams._StreamMark, "wait", lambda self: None)
    # Other numbers, or an error that they lead to. And the hosts are threads: a life may fail in another way when it is repeated.
    with pytest.raises((AssertionError, ValueError, RuntimeError, ExceptionGroup, Flaky)):
        getattr(lives, kind)(settings(drawn, max_examples=40, phases=[Phase.generate]))  # up to the first that finds it
