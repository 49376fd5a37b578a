"""A quantizer for blocks of any size, of any element under any scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fxquant.checks import OneOf, checked, did_you_mean
from fxquant.errors import RecipeError, SettingError
from fxquant.formats import CUSTOM, ELEMENTS, FORMATS, MX_MODES, SCALES, Format, QuantSpec
from fxquant.quantizers.base import QuantizedOperand, QuantizedTensor, Quantizer, padded, quantizer_text
from fxquant.roles import Direction

_ELEMENT_DTYPES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float4_e2m1fn_x2: "e2m1",
    torch.int8: "int8",
}
_SCALE_DTYPES = {dtype: name for name, dtype in SCALES.items()}
_FOREIGN = {"fp8": "e4m3", "fp4": "e2m1", "fp6": "e2m3", "float4": "e2m1", "float6": "e2m3", "i8": "int8"}


def block_format(element: str, block: tuple[int, int], scale: str) -> Format:
    """The row of an element in blocks of (rows, columns) with such a scale: that of `FORMATS`, or one of its own."""
    built_in = (row for row in FORMATS.values() if row.element is not None and row.element.name == element)
    for row in built_in:
        if (row.block, row.scale_dtype) == (block, SCALES[scale]):
            return row
    rows, columns = ("all" if size == 0 else size for size in block)
    alignment = math.lcm(block[1] or 1, ELEMENTS[element].group)
    return replace(
        CUSTOM, name=f"{element}_{rows}x{columns}_{scale}", element=ELEMENTS[element], block=block,
        scale_dtype=SCALES[scale], alignment=alignment, has_global_amax=scale == "e4m3",
    )  # fmt: skip


_MODE = "a setting of scales in e8m0, which round to powers of two"


@checked(
    takes={
        "block_size": "write block=(1, 32), rows and columns that share a scale",
        "dtype": "write element=",
        "fp8_dtype": "write element=",
        "elem_dtype": "write element=",
        "scale_dtype": "write scale=",
        "stochastic_rounding": "write rounding='stochastic'",
    }
)
@dataclass(frozen=True)
class BlockQuantizer(Quantizer):
    """Any element in blocks of any size under any scale.

        BlockQuantizer("e2m3")                                  # MXFP6
        BlockQuantizer("int8", block=(1, 32), scale="e8m0")     # MXINT8
        BlockQuantizer("e2m1", (1, 32), torch.float8_e4m3fn)    # NVFP4 with blocks of 32

    `element`: ``e4m3``, ``e5m2``, ``e2m3``, ``e3m2``, ``e2m1`` or ``int8``, or torch's dtype for it (OCP MX v1.0,
    section 5.3). `block`: the rows and columns that share a scale, of an operand whose last axis is contracted; 0
    stands for the whole axis. `scale`: ``e8m0``, ``float32``, ``bfloat16`` or ``e4m3``, the last under one float32 amax
    of the tensor as in NVFP4. `rounding`: ``nearest``, ties to even, or ``stochastic``, by 8 random bits an element.
    `scale_mode` rounds an e8m0 scale as in `MXFP8Quantizer`.

    A format that this package has otherwise, MXFP8 for one, is that format, with its kernels. Others run emulated, as
    quantizers of one's own do: a block in which something is not finite is NaN.
    """

    element: Any
    block: tuple[int, int] = (1, 32)
    scale: Any = "e8m0"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scale_mode: Annotated[str, OneOf(*MX_MODES)] = "rceil"

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", _name("element", self.element, ELEMENTS, _ELEMENT_DTYPES))
        object.__setattr__(self, "scale", _name("scale", self.scale, SCALES, _SCALE_DTYPES))
        sizes: Any = self.block
        if not (isinstance(sizes, tuple | list) and len(sizes) == 2 and all(type(n) is int and n >= 0 for n in sizes)):
            hint = f": write (1, {sizes})" if type(sizes) is int and sizes > 0 else ""
            raise SettingError(
                f"BlockQuantizer: block must be two sizes, rows and columns such as (1, 32), not {sizes!r}{hint}"
            )
        object.__setattr__(self, "block", tuple(sizes))
        if self.scale_mode != "rceil" and self.scale != "e8m0":
            raise RecipeError(
                f"BlockQuantizer: scale_mode={self.scale_mode!r} is {_MODE}: leave it out, or set scale='e8m0'"
            )

    @property
    def row(self) -> Format:
        """The format, a row of `FORMATS` where it is one of them."""
        return block_format(self.element, self.block, self.scale)

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """The multiple to which the contracted axis is padded: whole blocks in whole bytes."""
        return self.row.alignment

    def spec(self, direction: Direction) -> QuantSpec:
        from fxquant.kernels import custom

        row, stochastic = self.row, self.rounding == "stochastic"
        if row.name in FORMATS and (row.family == "nvfp4" or not stochastic):
            return QuantSpec(format=row.name, mode=self.scale_mode, stochastic=stochastic)
        name = "_".join([row.name, *([self.scale_mode] if self.scale_mode != "rceil" else [])])
        key = f"{name}-{self.rounding}"  # all settings: equal keys are equal quantizers
        custom.register(key, self)
        return QuantSpec(format="custom", key=key, stochastic=stochastic)

    def quantize(
        self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True, generator: torch.Generator | None = None
    ) -> QuantizedTensor:
        """`Quantizer.quantize`; stochastic rounding takes two numbers from `generator`."""
        return self._quantize(x, rowwise, columnwise, generator)

    def quantize_side(
        self, x: Tensor, direction: str, draw: Callable[[torch.Size], Tensor] | None = None
    ) -> list[Tensor]:
        from fxquant.kernels.cast import blocks

        x = padded(x, self.alignment, direction)
        x = x.mT if direction == "columnwise" else x
        random: Tensor | None = None
        if self.rounding == "stochastic":
            if draw is None:
                raise RecipeError(f"{self} rounds stochastically: it needs the seed and step of a graph's state")
            *outer, columns = x.shape
            random = draw(torch.Size([*outer, (columns + 15) // 16 * 16])).narrow(-1, 0, columns)
        return blocks.quantize(x.float() if x.dtype == torch.float64 else x, self.row, self.scale_mode, random)

    def dequantize(self, operand: QuantizedOperand) -> Tensor:
        """The values of one half of a quantized tensor, in its own orientation."""
        from fxquant.kernels.cast import blocks

        if not isinstance(operand, QuantizedOperand) or self.row.name in FORMATS:
            return super().dequantize(operand)
        parts, needed = operand.tensors(), ["data", "scale", "global_amax"][: 3 if self.row.has_global_amax else 2]
        if len(parts) != len(needed) or parts[0].element_size() > 1:
            kinds = ", ".join(str(part.dtype) for part in parts)
            raise RecipeError(
                f"{quantizer_text(self)} dequantizes what its quantize gave, {', '.join(needed)} with at most a byte "
                f"for an element, not {kinds}"
            )
        return blocks.dequantize(parts, self.row)


def _name(what: str, value: Any, names: dict[str, Any], dtypes: dict[torch.dtype, str]) -> str:
    """The name of an element or scale, which may be given as torch's dtype."""
    if isinstance(value, torch.dtype) and value in dtypes:
        return dtypes[value]
    if isinstance(value, str) and value in names:
        return value
    shown = ", ".join([*map(repr, names), *map(str, dtypes)])
    hint = did_you_mean(value, names, {**_FOREIGN, **{str(dtype): name for dtype, name in dtypes.items()}})
    raise SettingError(f"BlockQuantizer: {what} must be one of {shown}, not {value!r}{hint}")
