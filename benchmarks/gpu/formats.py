"""What reading and making quantised values takes on one GPU, by torch's operations and by the kernels that are used there.

    python benchmarks/gpu/formats.py --output results      # one CUDA device; under a minute
    python benchmarks/gpu/formats.py --smoke               # tiny, on the CPU, where there are no kernels: its numbers mean nothing

At rest: a matrix of 4096 x 14336 is decoded into bf16. Transfers: a slice of 218 million bf16, a block of an 8 B Llama, is encoded, decoded
into bf16, and added to a float32 sum.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch

import zero3
from benchmarks.common.report import markdown, median, progress, write
from benchmarks.gpu.device import device
from zero3.quantized.wire import Rows, row_kernels_on

AT_REST = (zero3.NF4(), zero3.NF4(double_quant=False), zero3.MXFP4(), zero3.Int8(), zero3.Float8())
TRANSFERS = (zero3.Int8(), zero3.Int8(stochastic=True), zero3.Float8())
REPETITIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU: shows that the script runs, and nothing else")
    parser.add_argument("--output", type=Path, help="a folder for the table and all that was measured")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu/formats.py needs one CUDA device, and finds none. (--smoke runs its paths, tiny, on the CPU.)")
    of = device(args.smoke)
    where = torch.device(of.name, 0) if of.name == "cuda" else torch.device(of.name)

    def ms(work: Callable[[], object]) -> float:
        work()
        found = []
        for _ in range(REPETITIONS):
            first = of.clock.now()
            work()
            found.append(of.clock.seconds(first, of.clock.now()) * 1e3)
        return median(found)

    rows: list[list[object]] = []
    shape, numel = ((64, 256), 2**14) if args.smoke else ((4096, 14336), 218_000_000)
    for kind in AT_REST:
        progress(kind.name)
        codec, out = kind.codec(where), torch.empty(shape, dtype=torch.bfloat16, device=where).view(-1)
        quantized = kind.quantize(torch.randn(shape, device=where))
        ways = codec.decode_in_slices, codec.decode
        rows.append([kind.name, "decode, at rest", *(f"{ms(partial(way, quantized, 0, out)):.3f}" for way in ways)])
    values, total = torch.randn(numel, device=where).bfloat16(), torch.zeros(numel, device=where)
    for kind in TRANSFERS:
        progress(kind.name)
        found = []
        for kernels in (None, row_kernels_on(where, kind)):
            row = (all_rows := Rows(kind, [numel], 0, kernels))[0]
            raw, work, out = all_rows.empty(where), all_rows.work(where), torch.empty_like(values)
            found.append(
                [
                    ms(partial(row.encode, [values], raw, work, 7)),
                    ms(partial(row.decode, raw, out, work)),
                    ms(partial(row.decode, raw, total, work, add=True)),
                ]
            )
        for what, by_operations, by_kernels in zip(("encode", "decode", "add"), *found, strict=True):
            rows.append([kind.name, f"{what}, a transfer", f"{by_operations:.3f}", f"{by_kernels:.3f}"])
    table = markdown(["format", "what", "torch's operations, ms", "as it is used, ms"], rows)
    write(args.output, "formats", {"smoke": args.smoke, "rows": rows}, table)


if __name__ == "__main__":
    main()
