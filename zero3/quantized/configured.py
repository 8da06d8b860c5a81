"""The format that a Hugging Face model's configuration asks for: `quantization_config` of
bitsandbytes (NF4), DeepSeek (fp8), gpt-oss.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .formats import MXFP4, NF4, Float8, Format

__all__: list[str] = []


class Configured(NamedTuple):
    """A format, and the names of the modules that it leaves out: names, parts of names, or
    patterns.
    """

    format: Format
    left_out: tuple[str, ...]
    experts_alone: bool = False

    def covers(self, module: str, dims: int) -> bool:
        """Whether the weight of this module, in the model that the configuration is of, is to be
        quantised. `dims` are the weight's.
        """
        if self.experts_alone and dims != 3:
            return False
        return not any(
            f".{name}." in f".{module}." or re.match(rf"(?:{name})(?=\.|$)", module)
            for name in self.left_out
        )


def configured_in(config: object) -> Configured | None:
    """What `config.quantization_config` asks for. None: nothing, or nothing that has a format
    here.
    """
    asked: Any = getattr(config, "quantization_config", None)
    found: dict[str, Any] = (
        asked if isinstance(asked, dict) else asked.to_dict() if hasattr(asked, "to_dict") else {}
    )
    method = str(getattr(found.get("quant_method"), "value", found.get("quant_method")))
    four_bits = found.get("load_in_4bit") or found.get("_load_in_4bit")
    if method == "bitsandbytes" and four_bits and found.get("bnb_4bit_quant_type") == "nf4":
        return Configured(
            NF4(double_quant=bool(found.get("bnb_4bit_use_double_quant"))),
            tuple(found.get("llm_int8_skip_modules") or ()),
        )
    left_out: Any = found.get("modules_to_not_convert") or ()
    if method == "fp8" and found.get("weight_block_size"):
        rows, columns = found["weight_block_size"]
        return Configured(Float8(block=(rows, columns)), tuple(left_out))
    if method == "mxfp4":
        return Configured(MXFP4(transposed=True), tuple(left_out), experts_alone=True)
    return None
