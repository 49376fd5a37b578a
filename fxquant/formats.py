"""Every number format and every way of scaling it, as rows of two tables.

Nothing else derives these facts from a dtype. Operators take the text of a `QuantSpec`: ``per_tensor_e4m3(pow2)``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fxquant.errors import RecipeError

Family = Literal["identity", "custom", "per_tensor", "per_row", "per_head", "block", "mxfp8", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Element:
    """One element format.

    Sources: e4m3 and e5m2 from OCP OFP8 v1.0 section 5; e2m3 and e3m2, e2m1 and int8 from OCP MX v1.0 sections 5.3.2,
    5.3.3 and 5.3.4; e8m0 from its section 5.4.1. An int8 counts 1/64: its values are those of one exponent, without -2.
    """

    name: str
    dtype: torch.dtype
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    has_inf: bool
    has_nan: bool

    @property
    def packed(self) -> int:
        """Elements in one byte of storage."""
        return 8 // self.bits

    @property
    def group(self) -> int:
        """The least number of elements that fill whole bytes."""
        return 8 // math.gcd(8, self.bits)


ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        Element(
            name="e4m3", dtype=torch.float8_e4m3fn, bits=8, exponent_bits=4, mantissa_bits=3,
            max=448.0, smallest_normal=2.0**-6, has_inf=False, has_nan=True,
        ),
        Element(
            name="e5m2", dtype=torch.float8_e5m2, bits=8, exponent_bits=5, mantissa_bits=2,
            max=57344.0, smallest_normal=2.0**-14, has_inf=True, has_nan=True,
        ),
        Element(
            name="e2m1", dtype=torch.float4_e2m1fn_x2, bits=4, exponent_bits=2, mantissa_bits=1,
            max=6.0, smallest_normal=1.0, has_inf=False, has_nan=False,
        ),
        Element(
            name="e2m3", dtype=torch.uint8, bits=6, exponent_bits=2, mantissa_bits=3,
            max=7.5, smallest_normal=1.0, has_inf=False, has_nan=False,
        ),
        Element(
            name="e3m2", dtype=torch.uint8, bits=6, exponent_bits=3, mantissa_bits=2,
            max=28.0, smallest_normal=0.25, has_inf=False, has_nan=False,
        ),
        Element(
            name="int8", dtype=torch.int8, bits=8, exponent_bits=0, mantissa_bits=6,
            max=127 / 64, smallest_normal=1.0, has_inf=False, has_nan=False,
        ),
    )
}  # fmt: skip

SCALES: dict[str, torch.dtype] = {
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""The scales of blocks by name; those in e4m3 stand under one float32 amax of the tensor."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A way of scaling one element format.

    `block` is the (rows, columns) that share one scale in the orientation whose last axis is contracted; 0 means the
    whole extent of that axis. Graphs pad the contracted axis with zeros to a multiple of `alignment`: whole blocks, or
    the demand of a hardware GEMM.
    """

    name: str
    family: Family
    element: Element | None
    block: tuple[int, int]
    scale_dtype: torch.dtype | None
    alignment: int
    has_global_amax: bool = False

    @property
    def packed(self) -> int:
        """Elements in one element of the payload."""
        return 1 if self.element is None else self.element.packed

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of payload, scale and global amax in graphs: bytes where torch computes with nothing finer."""
        if self.element is None or self.scale_dtype is None:
            return ()
        payload = torch.uint8 if self.element.packed > 1 else self.element.dtype
        scale = torch.uint8 if self.scale_dtype == torch.float8_e8m0fnu else self.scale_dtype
        return (payload, scale, torch.float32) if self.has_global_amax else (payload, scale)

    @property
    def bytes_per_element(self) -> float:
        """Payload and scales, for blocks with a fixed number of elements."""
        if self.element is None:
            return 2.0
        size = self.element.bits / 8
        rows, columns = self.block
        if rows and columns and self.scale_dtype is not None:
            # a 2-d block's scale is stored once for each of its rows where the hardware wants it so (MX, NVFP4)
            shared = columns if self.family in ("mxfp8", "nvfp4") else rows * columns
            size += self.scale_dtype.itemsize / shared
        return size


def _rows() -> Iterator[Format]:
    yield Format(name="identity", family="identity", element=None, block=(0, 0), scale_dtype=None, alignment=1)
    f32, e8m0 = torch.float32, torch.float8_e8m0fnu
    table: tuple[tuple[str, Family, tuple[int, int], torch.dtype, int], ...] = (
        ("per_tensor", "per_tensor", (0, 0), f32, 16),
        ("per_row", "per_row", (1, 0), f32, 16),
        ("block_1x128", "block", (1, 128), f32, 128),
        ("block_128x128", "block", (128, 128), f32, 128),
        ("mxfp8", "mxfp8", (1, 32), e8m0, 32),
        ("mxfp8_2d", "mxfp8", (32, 32), e8m0, 32),
        ("per_head", "per_head", (0, 0), f32, 16),
        ("per_head_128", "per_head", (128, 0), f32, 16),
    )
    for element in ("e4m3", "e5m2"):
        for name, family, block, scale_dtype, alignment in table:
            yield Format(
                name=f"{name}_{element}", family=family, element=ELEMENTS[element], block=block,
                scale_dtype=scale_dtype, alignment=alignment,
            )  # fmt: skip
    for name, block in (("nvfp4", (1, 16)), ("nvfp4_2d", (16, 16))):
        yield Format(
            name=name, family="nvfp4", element=ELEMENTS["e2m1"], block=block, scale_dtype=torch.float8_e4m3fn,
            alignment=16, has_global_amax=True,
        )  # fmt: skip


FORMATS: dict[str, Format] = {row.name: row for row in _rows() if row.family != "per_head"}

HEAD_FORMATS: dict[str, Format] = {row.name: row for row in _rows() if row.family == "per_head"}
"""The scalings that only attention has: a scale for each entry of the batch and key head, or 128 positions of it."""

CUSTOM = Format(name="custom", family="custom", element=None, block=(0, 0), scale_dtype=None, alignment=1)
"""The format of a user's own quantizer."""


ERROR_MODES = ("mae", "mse")

MX_MODES = ("rceil", "floor", "ceil", "even")


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """A format and the choices it leaves open, for one direction of one operand.

    `pow2` rounds a float32 scale down to a power of two. `eps` is the least amax. `torchao` takes torchao's scale
    formula, computed in float64 with amax floored at 1e-12. `mode` is the rounding of MX scales. `rht` applies the
    16-point randomized Hadamard transform before quantizing (columnwise NVFP4 only), `random_signs` its sign mask.
    `nonfinite` is that of a gradient: what is not finite stays so (`QuantSpec.shown`). With `swizzled` MX and NVFP4
    scales lie as tensor cores read them (`fxquant.kernels.cast.swizzle`).
    Amaxes are the largest `over` process groups, joined by ``+``. `dtype` is the cast of an identity, empty for none.
    `slot` is the place of a delayed scale in the state of its graph, -1 where the scale comes from the tensor itself.
    `key` finds a user's own quantizer (format ``custom``) in `fxquant.kernels.custom`.

    `stochastic` rounds elements up or down at random, by the numbers of its random `stream`; NVFP4 can, and quantizers
    with a `key`. NVFP4 alone: `row_scaled` takes the float32 amax of each row, and `four_over_six` (``mae`` or ``mse``)
    the better of two scales for each block by that error; `e4m3_max` is the largest block scale.
    """

    format: str
    pow2: bool = False
    eps: float = 0.0
    torchao: bool = False
    mode: str = "rceil"
    rht: bool = False
    random_signs: bool = True
    stochastic: bool = False
    stream: int = 0
    row_scaled: bool = False
    four_over_six: str = ""
    e4m3_max: int = 448
    nonfinite: bool = False
    swizzled: bool = False
    over: str = ""
    dtype: str = ""
    slot: int = -1
    key: str = ""

    @property
    def is_delayed(self) -> bool:
        return self.slot >= 0

    @property
    def scaled(self) -> str:
        """``tensor``, or ``row``, where the whole of it has one scale or global amax; empty for blocks alone."""
        by_row = self.row.family == "per_row" or self.row_scaled
        return "row" if by_row else "tensor" if self.row.family == "per_tensor" or self.row.has_global_amax else ""

    @property
    def row(self) -> Format:
        return CUSTOM if self.key else FORMATS.get(self.format) or HEAD_FORMATS[self.format]

    @property
    def is_identity(self) -> bool:
        return self.format == "identity"

    @property
    def unit_amax(self) -> float:
        """The global amax of NVFP4 whose factor in dequantization is one."""
        assert self.row.element is not None
        return self.row.element.max * self.e4m3_max

    def shown(self) -> QuantSpec:
        """A copy under which NaN and infinity stay visible in the quantized tensor, as a `GradScaler` looks for them.

        Where an infinite element would be cast to the format's largest number, all that shares its scale becomes NaN,
        under a delayed scale the element alone. So do the blocks of NVFP4 that have NaN, for which its elements have no
        code. Other formats show both by themselves: scales of MXFP8 and by torchao's formula follow an infinite amax.
        """
        hides = self.row.family in ("per_tensor", "per_row", "per_head", "block", "nvfp4") and not self.torchao
        return replace(self, nonfinite=True) if hides else self

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the payload, with its padding, the scales and the global amax of an operand [rows, columns].

        An identity counts as 16 bits an element. The columns are the contracted axis.
        """
        row = self.row
        if row.element is None or row.scale_dtype is None:
            return int(rows * columns * row.bytes_per_element)
        columns = -(-columns // row.alignment) * row.alignment
        high, wide = row.block  # a 2-d block's scale is stored for each of its rows where the hardware wants it so
        down = rows if row.family in ("mxfp8", "nvfp4") else -(-rows // high) if high else 1
        scales = down * (columns // wide if wide else 1)
        amaxes = (rows if self.row_scaled else 1) if row.has_global_amax else 0
        return rows * columns // row.element.packed + scales * row.scale_dtype.itemsize + 4 * amaxes

    def __post_init__(self) -> None:
        if self.format not in FORMATS and self.format not in HEAD_FORMATS and not self.key:
            raise RecipeError(f"unknown format {self.format!r}; known formats: {', '.join(FORMATS)}")
        if self.mode not in MX_MODES:
            raise RecipeError(f"unknown MX scale mode {self.mode!r}; known modes: {', '.join(MX_MODES)}")
        of_nvfp4 = ("stochastic", "row_scaled", "four_over_six", "e4m3_max")
        chosen = [name for name in of_nvfp4 if getattr(self, name) != getattr(QuantSpec, name)]
        if chosen and not self.key and self.row.family != "nvfp4":
            raise RecipeError(f"{', '.join(chosen)} is part of NVFP4 alone, not of {self.format}")
        if self.four_over_six not in ("", *ERROR_MODES):
            raise RecipeError(f"unknown error mode {self.four_over_six!r}; known modes: {', '.join(ERROR_MODES)}")

    def __str__(self) -> str:
        settings = ((f.name, getattr(self, f.name)) for f in fields(self)[1:] if getattr(self, f.name) != f.default)
        changed = ",".join(name if value is True else f"{name}={value}" for name, value in settings)
        return f"{self.format}({changed})" if changed else self.format

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> QuantSpec:
        """The inverse of `str(spec)`."""
        name, _, rest = text.partition("(")
        kinds: dict[str, type] = {field.name: type(field.default) for field in fields(cls)[1:]}
        options: dict[str, object] = {}
        for item in filter(None, rest.removesuffix(")").split(",")):
            key, _, value = item.partition("=")
            if key not in kinds:
                raise RecipeError(f"unknown option {key!r} in quantization spec {text!r}")
            options[key] = value != "False" if kinds[key] is bool else kinds[key](value)
        return cls(format=name, **options)  # type: ignore[arg-type]


IDENTITY = QuantSpec(format="identity")


@dataclass(frozen=True)
class OperandSpec:
    """Both directions of one operand. `from_rowwise`: the columnwise half quantizes the dequantized rowwise half."""

    rowwise: QuantSpec
    columnwise: QuantSpec
    from_rowwise: bool = False

    def shown(self) -> OperandSpec:
        """A copy both of whose directions are `QuantSpec.shown`."""
        return OperandSpec(self.rowwise.shown(), self.columnwise.shown(), self.from_rowwise)

    @property
    def is_stochastic(self) -> bool:
        """True if a direction takes random numbers."""
        return self.rowwise.stochastic or self.columnwise.stochastic

    def numbered(self, number: int) -> OperandSpec:
        """A copy whose directions have random streams of their own, by the operand's number in its graph."""
        sides = enumerate((self.rowwise, self.columnwise), 2 * number)
        row, column = (replace(side, stream=stream) if side.stochastic else side for stream, side in sides)
        return OperandSpec(row, column, self.from_rowwise)

    def __str__(self) -> str:
        if self.rowwise == self.columnwise and not self.from_rowwise:
            return str(self.rowwise)
        return f"{self.rowwise}{'>' if self.from_rowwise else '|'}{self.columnwise}"

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> OperandSpec:
        """The inverse of `str(spec)`."""
        row, *column = map(QuantSpec.parse, re.split("[|>]", text))
        return cls(row, column[0] if column else row, ">" in text)


LINEAR_OPERANDS = ("input", "weight", "grad_output")


def _joined(parts: Sequence[str], autocast: str, name: str) -> str:
    return " ".join([*parts, *([f"autocast={autocast}"] if autocast else []), f"name={name}"])


def _split(text: str) -> dict[str, str]:
    """The items of a text by key, ``autocast`` and ``name`` always among them."""
    head, _, name = text.partition("name=")
    return {"autocast": "", **dict(item.split("=", 1) for item in head.split()), "name": name}


@dataclass(frozen=True)
class LinearSpec:
    """The settings of `fxquant::linear`: its three operands, the autocast dtype in force, and its layer's name."""

    input: OperandSpec
    weight: OperandSpec
    grad_output: OperandSpec
    autocast: str = ""
    name: str = ""

    def __str__(self) -> str:
        parts = [f"{operand}={getattr(self, operand)}" for operand in LINEAR_OPERANDS]
        return _joined(parts, self.autocast, self.name)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> LinearSpec:
        """The inverse of `str(spec)`."""
        items = _split(text)
        specs = {operand: OperandSpec.parse(items[operand]) for operand in LINEAR_OPERANDS}
        return cls(**specs, autocast=items["autocast"], name=items["name"])


@dataclass(frozen=True)
class Step:
    """One operation on the scores of an attention, between its first product and its softmax.

    ``mul`` by tensor `extra`, or by the number `value` without one; ``add`` likewise; ``tanh``; ``keep`` where tensor
    `extra` is true, and -inf elsewhere; ``fill`` with `value` where tensor `extra` is true; ``causal`` keeps keys up to
    the query's own position; ``sink`` makes tensor `extra` [..., 1] one more column of the softmax.
    """

    kind: str
    value: float = 0.0
    extra: int = -1

    def __str__(self) -> str:
        return f"{self.kind}:{self.value!r}:{self.extra}"

    @classmethod
    def parse(cls, text: str) -> Step:
        """The inverse of `str(step)`."""
        kind, value, extra = text.split(":")
        return cls(kind, float(value), int(extra))


ATTENTION_OPERANDS = ("qkv", "s", "do", "dp", "o", "dqkv")


@dataclass(frozen=True)
class AttentionSpec:
    """The settings of `fxquant::attention`: the quantization of its tensors, and the steps from scores to weights.

    `qkv`: the operands; `s`: the softmax; `do`: the output's gradient; `dp`: the scores' gradient; `o` and `dqkv`: the
    results. `dropout` is the probability that a weight is dropped.
    """

    qkv: QuantSpec = IDENTITY
    s: QuantSpec = IDENTITY
    do: QuantSpec = IDENTITY
    dp: QuantSpec = IDENTITY
    o: QuantSpec = IDENTITY
    dqkv: QuantSpec = IDENTITY
    steps: tuple[Step, ...] = ()
    dropout: float = 0.0
    autocast: str = ""
    name: str = ""

    @property
    def uses_state(self) -> bool:
        """True if a scale stands in the graph's state."""
        return any(getattr(self, operand).is_delayed for operand in ATTENTION_OPERANDS)

    @property
    def has_fp8_backward(self) -> bool:
        """True if the backward quantizes its gradients; else it runs in high precision on the stored q, k and v."""
        return not self.do.is_identity

    def each(self, change: Callable[[QuantSpec], QuantSpec]) -> AttentionSpec:
        """A copy with every tensor's spec changed."""
        specs: dict[str, Any] = {operand: change(getattr(self, operand)) for operand in ATTENTION_OPERANDS}
        return replace(self, **specs)

    def __str__(self) -> str:
        parts = [f"{operand}={getattr(self, operand)}" for operand in ATTENTION_OPERANDS]
        parts += [f"steps={';'.join(map(str, self.steps))}", f"dropout={self.dropout!r}"]
        return _joined(parts, self.autocast, self.name)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> AttentionSpec:
        """The inverse of `str(spec)`."""
        items = _split(text)
        steps = tuple(map(Step.parse, filter(None, items["steps"].split(";"))))
        specs: dict[str, Any] = {operand: QuantSpec.parse(items[operand]) for operand in ATTENTION_OPERANDS}
        dropout, autocast, name = float(items["dropout"]), items["autocast"], items["name"]
        return cls(**specs, steps=steps, dropout=dropout, autocast=autocast, name=name)


def check_parts(parts: Sequence[Tensor], spec: QuantSpec) -> None:
    """Raises RecipeError if a conversion such as `.half()` of a module has changed a quantized operand."""
    for what, part, dtype in zip(("payload", "scale", "global amax"), parts, spec.row.dtypes, strict=False):
        _check_dtype(what, part, dtype, spec)


def check_state(state: Tensor | None, spec: QuantSpec) -> None:
    """Raises RecipeError if a conversion has changed the state that a quantization takes."""
    if state is not None:
        _check_dtype("state", state, torch.int64 if spec.stochastic else torch.float32, spec)


def _check_dtype(what: str, tensor: Tensor, dtype: torch.dtype, spec: QuantSpec) -> None:
    if tensor.dtype != dtype:
        raise RecipeError(
            f"{spec.format}: the {what} is {tensor.dtype} and has to be {dtype}: convert a model by .half() or "
            ".to(dtype) before it is quantized, not after"
        )


def is_mixed(a: QuantSpec, b: QuantSpec) -> bool:
    """Returns True for formats of this package that no GEMM has together, one of them high precision or neither.

    Such a pair is emulated: what is quantized is dequantized, and a GEMM in high precision multiplies.
    """
    families = {a.row.family, b.row.family}
    unlike = len(families) > 1 and families != {"per_tensor", "per_row"}
    return (unlike or a.row.block[1] != b.row.block[1]) and "custom" not in families


def gemm_mismatch(a: QuantSpec, b: QuantSpec) -> str | None:
    """The reason why operands quantized as `a` and `b` are not multiplied, or None; those that are mixed are emulated.

    cuBLAS has no FP8 matrix instruction for e5m2 by e5m2 (cublasLtMatmul, FP8 kernels table), and no kernel takes two
    2-d block scalings.
    """
    families = {a.row.family, b.row.family}
    if "custom" in families or families == {"identity"}:
        return None
    if "per_head" in families:
        return "a scaling by heads is for attention alone"
    if is_mixed(a, b):
        return None
    if a.row.family == "block" and a.row.block[0] > 1 and b.row.block[0] > 1:
        return "a 128x128-scaled operand multiplies only a 1x128-scaled one"
    if a.row.element == b.row.element == ELEMENTS["e5m2"]:
        return "no FP8 GEMM multiplies e5m2 by e5m2"
    if a.rht != b.rht or (a.rht and a.random_signs != b.random_signs):
        return "only one operand is Hadamard-transformed, so the transform would not cancel"
    return None
