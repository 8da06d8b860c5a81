"""Random lives of models with towers, each against one plain process: `python -m tests.towers.soak --help`."""

from __future__ import annotations

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int, help="the first seed")
    parser.add_argument("count", type=int)
    parser.add_argument(
        "--device", action="store_true", help="on the simulated device; otherwise ranks are threads with drawn delays, and some fail"
    )
    given = parser.parse_args()
    if given.device:
        import tests.device.simulated  # noqa: F401 - before torch
        from tests.device.test_towers import test_towers_in_any_order_of_streams_are_as_one_process as check
    else:
        from tests.support.towers import check_life, drawn_life

        check = lambda seed: check_life(drawn_life(seed))  # noqa: E731
    wrong, begin = [], time.monotonic()
    for seed in range(given.first, given.first + given.count):
        try:
            check(seed)
        except Exception as error:
            wrong.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    print(f"{given.count} lives in {time.monotonic() - begin:.0f} s, wrong: {wrong or 'none'}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
