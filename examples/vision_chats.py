"""Fine-tunes a vision and language model on chats, some with images and some without, spread over all processes.

    torchrun --nproc-per-node 2 examples/vision_chats.py                                   a small model, and pictures drawn here
    torchrun --nproc-per-node 8 examples/vision_chats.py --model DIR --data chats.jsonl    your model, your chats

It is `sft.py`, with its options, on other data: one process may have a text while another has an image, and nothing is a dummy.
"""

from __future__ import annotations

import sft

if __name__ == "__main__":
    sft.main(pictures=True)
