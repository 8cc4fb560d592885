"""Methods by the names that a job gives them."""

from __future__ import annotations

from verbund.comm.compression.blocks import Blocks
from verbund.comm.compression.cast import BFloat16, Float16
from verbund.comm.compression.codec import Codec
from verbund.comm.compression.sign import Sign
from verbund.comm.compression.top_k import TopK
from verbund.job import Compression


def codec(settings: Compression) -> Codec | None:
    """The codec of a method; None for one that has none (`none`, `power_sgd`)."""
    stochastic = settings.rounding == "stochastic"
    match settings.name:
        case "fp16":
            return Float16()
        case "bf16":
            return BFloat16()
        case "int8":
            return Blocks(8, stochastic)
        case "int4":
            return Blocks(4, stochastic)
        case "sign":
            return Sign()
        case "top_k":
            return TopK(settings.density)
    return None
