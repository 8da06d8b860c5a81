"""The parts of `finetune.py` that are about language models and reports, not about sharding."""
