"""The decision for every operand of every matmul, with its reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch

from fxquant.checks import Words, checked
from fxquant.errors import ArgumentError
from fxquant.formats import AttentionSpec, Step
from fxquant.quantizers.base import Quantizer
from fxquant.roles import Direction, Gemm, QuantizerRole


class SkipReason(str, Words):
    """The reasons why an operand stays in high precision."""

    HIGH_PRECISION = "HIGH_PRECISION"
    TOO_SMALL = "TOO_SMALL"
    DTYPE = "DTYPE"
    LAYOUT = "LAYOUT"
    PLACEMENT = "PLACEMENT"
    GROUPED = "GROUPED"
    GATHERED_WEIGHT = "GATHERED_WEIGHT"
    ATTENTION = "ATTENTION"
    CONVOLUTION = "CONVOLUTION"
    BILINEAR = "BILINEAR"
    MULTI_PRODUCT = "MULTI_PRODUCT"
    UNSUPPORTED_FORM = "UNSUPPORTED_FORM"
    OPAQUE = "OPAQUE"
    STATE = "STATE"
    NOT_PROFITABLE = "NOT_PROFITABLE"
    NOT_CAPTURED = "NOT_CAPTURED"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]

    @property
    def remedy(self) -> str:
        """The way out, in a sentence or two."""
        return _REMEDIES[self]

    def __str__(self) -> str:
        return self.value


_MEANINGS = {
    "HIGH_PRECISION": "the recipe keeps this operand in high precision",
    "TOO_SMALL": "fewer than 16 input or output features: padding would cost more than it saves",
    "DTYPE": "integer, boolean, complex, or float64 (which stays exact unless allow_float64 is set)",
    "LAYOUT": "a sparse, quantized or otherwise not strided tensor",
    "PLACEMENT": "DTensors placed so that no product of the parts that a rank holds gives its part of the result",
    "GROUPED": "a grouped product (experts) that is no linear layer, or a quantizer that cannot take groups",
    "GATHERED_WEIGHT": "the weight is gathered by an index for each row: a batch of matrix-vector products",
    "ATTENTION": "attention that cannot be quantized as one; by hand, its products are then `matmul` roles",
    "CONVOLUTION": "a convolution that is not a matmul of its channels or patches",
    "BILINEAR": "a product of three tensors at once",
    "MULTI_PRODUCT": "several products in one node whose order is not a chain from the activation",
    "UNSUPPORTED_FORM": "a contraction that is not a matmul (diagonal, outer or summed axes), or a custom backward",
    "OPAQUE": "an operator whose inside cannot be seen",
    "STATE": "delayed scaling or stochastic rounding in a conditional, loop or shared region, which state cannot reach",
    "NOT_PROFITABLE": "the recipe is wrapped in auto, and the layer or attention is estimated to be slower quantized",
    "NOT_CAPTURED": "torch.compile left it out of its graphs: a graph break, or a disabled function or layer",
}

_REMEDIES = {
    "HIGH_PRECISION": "Nothing, if the recipe is meant so. Attention: set fp8_dpa=True in the recipe, as in "
    "fxquant.Float8CurrentScaling(fp8_dpa=True). A layer that a rule of yours keeps: change the rule. Another product "
    "of two activations: answer for module_type 'matmul' in a CustomRecipe.",
    "TOO_SMALL": "Nothing: it is a small part of the work. A layer that is wanted needs at least 16 features on both "
    "sides.",
    "DTYPE": "Compute in bfloat16, float16 or float32: convert the model, or train under torch.autocast. For float64 "
    "set the option allow_float64.",
    "LAYOUT": "Make the tensor dense, by to_dense() or dequantize(), before the product.",
    "PLACEMENT": "Place the parts by columns or rows, as parallelize_module does, or redistribute the tensor before "
    "it.",
    "GROUPED": "Give experts weights [experts, in, out] in one product, as torch.nn.functional.grouped_mm takes them, "
    "and a quantizer of the library.",
    "GATHERED_WEIGHT": "Let rows go to experts in groups: experts_implementation='grouped_mm' in transformers, "
    "torch.nn.functional.grouped_mm elsewhere.",
    "ATTENTION": "Call torch.nn.functional.scaled_dot_product_attention, without what the detail names. Or let a "
    "CustomRecipe quantize its products, with module_type 'matmul'.",
    "CONVOLUTION": "No setting changes that: convolutions are quantized where their kernel is 1, or as large "
    "as their stride (patches), and transposed ones are not.",
    "BILINEAR": "Write it as a product of two, followed by another.",
    "MULTI_PRODUCT": "Write the products one by one, (x @ a) @ b.",
    "UNSUPPORTED_FORM": "Write it as a matmul, with sums and diagonals taken before or behind it. A product in the "
    "backward of a custom autograd.Function stays as it is: without the Function, autograd takes the gradient of its "
    "forward, which is quantized.",
    "OPAQUE": "Write the operator's work in torch's functions. torch's fused inference of nn.TransformerEncoderLayer "
    "goes by torch.backends.mha.set_fastpath_enabled(False).",
    "STATE": "Use a recipe without state there, such as current_scaling or mxfp8, or take the layer out of the loop "
    "or conditional.",
    "NOT_PROFITABLE": "Nothing: quantized it would take longer. The recipe without auto() quantizes it all the same.",
    "NOT_CAPTURED": "Mend the graph breaks that the report lists, with file and line, or take away "
    "torch.compiler.disable; a layer that torch.compile does not capture needs another implementation.",
}


Size = int | str
"""A size, or the symbol of a dynamic one."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """The facts that decide the time of a product [M, K] x [N, K]^T, besides its formats.

    `dynamic` names the sizes that only the example has, and `most_m` is the largest M. `batch` products have operands
    of their own, which can be `batch_weights`; in grouped ones `groups` weights share the rows M. `dtype` is the
    high-precision GEMM's. `input` and `weight` are equal for equal tensors of a model. A `stored` weight is kept
    quantized, and not cast in each call; no call takes the amax of a `calibrated` input. `device` is a card's name,
    ``cpu`` or another type of device, with the `capability` of a CUDA one. `input_strides` and `weight_strides` are
    those of a matrix that lies in memory otherwise than by rows.
    """

    m: int
    k: int
    n: int
    most_m: int = sys.maxsize
    batch: int = 1
    batch_weights: bool = False
    groups: int = 0
    dynamic: str = ""
    dtype: torch.dtype = torch.bfloat16
    input: str = ""
    weight: str = ""
    stored: bool = False
    calibrated: bool = False
    input_strides: tuple[int, ...] = ()
    weight_strides: tuple[int, ...] = ()
    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """The facts that decide the time of an attention: sizes of the example, and its `spec` if it is quantized.

    q [batch, heads, queries, width], k [batch, kv_heads, keys, width], v [batch, kv_heads, keys, features], each with
    `axes` axes in the graph. A `fused` one is a node that torch has a kernel for, a `learned` one has a mask, bias or
    scale that gets a gradient. `site` is its first product's. `device` and `capability` are as in `Matmul`.
    """

    site: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    features: int
    axes: int = 4
    steps: tuple[Step, ...] = ()
    fused: bool = True
    learned: bool = False
    spec: AttentionSpec | None = None
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)


@checked(ArgumentError)
@dataclass(frozen=True, kw_only=True)
class Decision:
    """One operand of one GEMM: either a quantizer or a skip reason, never both, never neither.

    `shape` is the operand's own [rows, columns] ([batch, rows, columns] for a batched product), or the tensor's where
    an operator does not show its products; `flops` count the whole GEMM with dynamic sizes at their example values.
    `matmul`, or `attention` for both products of one, has the facts that decide the time, None if they are unknown. A
    `shared` operand comes from an attention that has quantized it.
    A `merged` GEMM runs once with an equal one of the same step, which has the FLOPs.
    `part` tells the products of one layer apart: ``QK^T`` and ``PV``, or the weight's name; empty if it has none.
    `bits` are those that a quantizer of the user's own takes for an element, with scales and padding; 0 for others.
    """

    role: QuantizerRole
    gemm: Gemm
    direction: Direction
    shape: tuple[Size, ...]
    quantizer: Quantizer | None = None
    skip_reason: SkipReason | None = None
    detail: str = ""
    form: str = ""
    site: int = 0
    flops: int = 0
    matmul: Matmul | None = None
    attention: Attended | None = None
    shared: bool = False
    bits: float = 0.0
    part: str = ""
    merged: bool = False

    def __post_init__(self) -> None:
        assert (self.quantizer is None) != (self.skip_reason is None), self

    @property
    def layer(self) -> str:
        return self.role.name

    @property
    def weighed(self) -> int:
        """The site whose estimate includes this one: the first product's for an attention."""
        return self.site if self.attention is None else self.attention.site


_NOT_TAKEN = {
    "dispatch_payloads": "ranks exchange rows in high precision",
    "gather_payloads": "ranks gather a tensor in high precision",
    "reuse_attention_payload": "a linear layer quantizes again what an attention beside it has quantized",
    "pair_directions": "the two directions of a tensor are quantized by a kernel each",
    "fuse_producers": "a quantization is not fused with what computes its tensor",
    "fuse_epilogues": "a GEMM does not finish its result itself",
    "amax_before_views": "an amax is taken behind the views of its tensor",
    "record_in_kernel": "an amax is recorded by a kernel of its own",
    "few_rows": "a GEMM of few rows does not take in what stands around it",
    "lower": "an operator does not run in its first kernel",
    "materialize_shared_inputs": "a result that several kernels read is left to Inductor",
}
"""The outcomes of passes that did not take what they considered, as the beginnings of sentences."""


@dataclass(frozen=True, kw_only=True)
class NotFused:
    """A fusion, or a kernel, that a pass (`step`) considered for an operator of a layer, and why it did not take it.

    `graph` is the ``forward`` or the ``backward`` that has the operator, or ``joint`` before they are cut apart.
    """

    step: str
    layer: str
    operator: str
    reason: str
    graph: str = ""

    @property
    def sentence(self) -> str:
        """The outcome with its reason, as a sentence without a full stop."""
        outcome = _NOT_TAKEN.get(self.step, f"the pass {self.step} did not take an operator")
        if self.step == "lower":
            return f"{outcome}, but in {self.reason}"
        return f"{outcome}, because {self.reason}"


@dataclass(frozen=True, kw_only=True)
class SentQuantized:
    """Rows that ranks exchange as payload and scales of `spec`, for an `operand` of `layers`.

    They take `bits` an element on the wire, `instead` of those of the tensor. Where it is `dequantized`, columns are
    quantized from what arrives.
    """

    layers: tuple[str, ...]
    operand: str
    spec: str
    bits: float
    instead: int
    dequantized: bool


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The bytes that a forward keeps for its backward, besides its inputs and parameters.

    `quantized` of the `total` are payloads and scales; `instead` is the size of the tensors that they are made of, as
    far as these would be kept.
    """

    total: int
    quantized: int
    instead: int

    @property
    def unquantized(self) -> int:
        """The bytes that a forward in high precision would keep in their place."""
        return self.total - self.quantized + self.instead

    def __add__(self, other: Saved) -> Saved:
        return Saved(
            total=self.total + other.total,
            quantized=self.quantized + other.quantized,
            instead=self.instead + other.instead,
        )


@dataclass(frozen=True)
class KeptInFp8:
    """A tensor that the option ``save="fp8"`` keeps in FP8: its layer, where that is known, and what gave it.

    It takes so many `bytes`, scales included, `instead` of those in its own dtype.
    """

    layer: str
    what: str
    bytes: int
    instead: int


@dataclass(frozen=True, kw_only=True)
class ComputedOnce:
    """A GEMM that torch computes once with an equal one: that of the matmul at a `place` in its captured graph."""

    place: int
    gemm: Gemm

    def applied(self, decision: Decision) -> Decision:
        """A decision for an operand of this GEMM."""
        detail = "; ".join(filter(None, (decision.detail, "computed once, with an equal product")))
        return replace(decision, merged=True, flops=0, detail=detail)


Considered = NotFused | SentQuantized | Saved | KeptInFp8 | ComputedOnce
"""The outcomes that passes behind autograd leave for a report."""
