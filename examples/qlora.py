"""Trains LoRA adapters on a frozen model in four bits (QLoRA), spread over all processes.

    torchrun --nproc-per-node 2 examples/qlora.py                                 a small model, made here
    torchrun --nproc-per-node 2 examples/qlora.py --model DIR --text FILE         your model, your text

It is `examples/lora.py` with one field of the policy more. Weights are quantised while they are read: each rank keeps its slices in four
bits, and gathers them in four bits. For chats: `examples/sft.py --lora 16 --quantize nf4`.
"""

from __future__ import annotations

import zero3
from lora import main

if __name__ == "__main__":
    main(quantize=zero3.NF4(), description=__doc__ or "")
