"""Quantizers: value objects that a recipe returns for a role.

A quantizer says how an operand is quantized in each direction; it holds no state, so equal settings compare
equal. Names and keyword arguments follow TransformerEngine. Used eagerly:

    q = MXFP8Quantizer(fp8_dtype=torch.float8_e4m3fn).quantize(x)
    q.rowwise.data, q.rowwise.scale, q.dequantize("rowwise")

`base` has the contract of a quantizer, `library` the quantizers of this package, `blocks` one for blocks of any size,
and `fingerprint` tells those of one's own apart.
"""

from fxquant.quantizers.base import (
    DelayedScalingRequest,
    Format,
    QuantizedOperand,
    QuantizedTensor,
    Quantizer,
    QuantizerRequest,
    quantizer_text,
    value_text,
)
from fxquant.quantizers.blocks import BlockQuantizer
from fxquant.quantizers.library import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8HeadQuantizer,
    Float8Quantizer,
    Float8RowwiseQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

__all__ = [
    "BlockQuantizer",
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8HeadQuantizer",
    "Float8Quantizer",
    "Float8RowwiseQuantizer",
    "Format",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedOperand",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRequest",
    "quantizer_text",
    "value_text",
]
