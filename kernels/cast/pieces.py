"""Casts on a CPU as operators of their own: compiled once for their format, and called by every graph.

What a format means is much code for a C++ compiler, and a graph of a training step has it tens of times. So graphs that
run beside fxquant call `quantize_piece` and `dequantize_piece`, each of which is compiled when it first runs, for its
spec and dtype and for all sizes, and is found in Inductor's cache by the next process. The bytes are those of
`reference`, which is what is compiled, and which runs as it is where a size is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxquant.compat import patches
from fxquant.compat.inside.memory import compile_lock
from fxquant.compat.patch import QuantizedGraphPass
from fxquant.compat.patches import compile_with_inductor
from fxquant.compat.private import get_hash_for_files, make_fx
from fxquant.compat.values import fakes_of_any_size, on_fakes
from fxquant.formats import QuantSpec, check_parts, check_state
from fxquant.kernels.cast import philox, reference
from fxquant.kernels.cast.ops import cut_to_size, dequantize, fake_operand, hybrid_quantize, quantize
from fxquant.kernels.cast.rounded import of_rounded
from fxquant.kernels.operator import Parts, operator


class _Piece(QuantizedGraphPass):
    """Changes nothing: it tells the changes to torch that what is compiled is of a quantized graph."""

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> Any:
        return get_hash_for_files((patches.__file__,), "piece")


SETTINGS = {
    "post_grad_custom_post_pass": _Piece(),
    "eager_numerics.division_rounding": True,  # scales are true quotients
    "cpp.enable_loop_tail_vec": False,  # with it, a dynamic tail of a one-byte store loses lanes (torch 2.13)
    "freezing": False,
    "cpp_wrapper": False,
}
"""Inductor's settings for a piece."""

_ROWS, _BLOCKS = 1031, 67
"""Sizes of examples that stand for any: large enough for loops to be shared by threads, and no other size of theirs."""

_Shape = Sequence[int]
_pieces: dict[Hashable, Callable[..., Any]] = {}


def _run_piece(
    what: tuple[str, str],
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
) -> list[Tensor]:
    """Calls a function that was compiled for tensors of these dtypes and shapes, in which examples stand for any."""
    key = (what, *((t.dtype, *shape) for t, shape in zip(inputs, shapes, strict=True)))
    if key not in _pieces:
        with compile_lock, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            if key not in _pieces:
                empty = (torch.empty(shape, dtype=t.dtype) for t, shape in zip(inputs, shapes, strict=True))
                fakes = fakes_of_any_size([*empty], (_ROWS, _BLOCKS))
                with on_fakes(fakes):
                    graph = make_fx(lambda *tensors: list(run(*tensors)))(*fakes)
                _pieces[key] = compile_with_inductor(graph, fakes, SETTINGS)
    return list(_pieces[key](*inputs))


@operator(namespace="fxquant_kernels")
def quantize_piece(x: Tensor, spec: str, state: Tensor | None = None) -> list[Tensor]:
    """`reference.quantize` of a tensor [*batch, R, C], dense."""
    parsed = QuantSpec.parse(spec)
    *batch, rows, length = x.shape
    tile, width = max(1, parsed.row.block[0]), parsed.row.alignment
    if x.numel() == 0 or (batch and tile > 1) or parsed.swizzled:
        return [part.contiguous() for part in reference.quantize(x, parsed, state)]
    x = x.float() if x.dtype == torch.float64 else x
    # a tile at the edge uses the elements that exist, and zeros change nothing in it
    x = torch.nn.functional.pad(x, (0, -length % width, 0, -rows % tile))
    x = x.reshape(-1, tile, x.shape[-1] // width, width).contiguous()
    inputs: list[Tensor] = [x]
    shapes: list[_Shape] = [(_ROWS, tile, _BLOCKS, width)]
    if state is not None:
        inputs.append(state)
        shapes.append(state.shape)
    if parsed.stochastic:  # so that two formats share what draws, and none draws for each element again
        inputs += _run_piece(("words", str(parsed.stream)), _words_of(parsed.stream), inputs, shapes)
        shapes.append((_ROWS, tile, _BLOCKS, 4))

    def run(x: Tensor, state: Tensor | None = None, words: Tensor | None = None) -> list[Tensor]:
        words = None if words is None else words.flatten(0, 1)
        parts = reference.quantize(x.flatten(2).flatten(0, 1), parsed, state, words=words)
        return [part.contiguous() for part in parts]

    parts = _run_piece(("quantize", spec), run, inputs, shapes)
    if batch:
        return [torch.unflatten(part, 0, (*batch, rows)) if part.ndim == 2 else part for part in parts]
    return [part.narrow(0, 0, rows).contiguous() if part.shape[0] > rows else part for part in parts]


def _words_of(stream: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Returns a function that draws for the elements of x [R / tile, tile, C / 16, 16]."""

    def run(x: Tensor, state: Tensor) -> list[Tensor]:
        many, tile, blocks, width = x.shape
        words = philox.random_words((many * tile, blocks * width), state.narrow(0, 0, 3), stream)
        return [torch.unflatten(words, 0, (many, tile)).contiguous()]

    return run


@quantize_piece.fake
def _quantize_piece_fake(x: Tensor, spec: str, state: Tensor | None = None) -> list[Tensor]:
    check_state(state, QuantSpec.parse(spec))
    return fake_operand(x, QuantSpec.parse(spec))


@functools.cache
def _payload_spec(text: str) -> QuantSpec:
    """The part of a spec on which the values of a payload depend, and not how it was made."""
    spec = QuantSpec.parse(text)
    by_row = spec.row.family in ("mxfp8", "nvfp4")  # their tiles have a scale for each of their rows
    format = spec.format.replace("_2d", "") if by_row else spec.format
    return QuantSpec(format=format, row_scaled=spec.row_scaled, e4m3_max=spec.e4m3_max)


@operator(namespace="fxquant_kernels")
def dequantize_piece(parts: Parts, spec: str) -> Tensor:
    """`reference.dequantize` of an operand, dense."""
    parsed = _payload_spec(spec)
    row, data = parsed.row, parts[0]
    *batch, rows, length = data.shape
    tile = max(1, row.block[0]) if row.family == "block" else 1
    assert row.element is not None
    width = row.alignment // row.element.packed
    if data.numel() == 0 or (tile > 1 and (batch or rows % tile)) or QuantSpec.parse(spec).swizzled:
        return reference.dequantize(parts, QuantSpec.parse(spec)).contiguous()
    inputs = [data.reshape(-1, tile, length // width, width).contiguous()]
    shapes: list[_Shape] = [(_ROWS, tile, _BLOCKS, width)]
    for part, columns in zip(parts[1:], (_BLOCKS if row.block[1] else 1, 1), strict=False):
        of_tensor = part.ndim == 1
        inputs.append(part if of_tensor else part.reshape(-1, part.shape[-1]).contiguous())
        shapes.append(part.shape if of_tensor else (_ROWS, columns))

    def run(data: Tensor, *scales: Tensor) -> list[Tensor]:
        return [reference.dequantize([data.flatten(2).flatten(0, 1), *scales], parsed).contiguous()]

    (values,) = _run_piece(("dequantize", str(parsed)), run, inputs, shapes)
    return torch.unflatten(values, 0, (*batch, rows)) if batch else values


@dequantize_piece.fake
def _dequantize_piece_fake(parts: Parts, spec: str) -> Tensor:
    parsed = QuantSpec.parse(spec)
    check_parts(parts, parsed)
    assert parsed.row.element is not None
    *lines, length = parts[0].shape
    return parts[0].new_empty([*lines, length * parsed.row.element.packed], dtype=torch.float32)


def dequantized(parts: Parts, spec: QuantSpec) -> Tensor:
    """`reference.dequantize` by a piece."""
    return parts[0].float() if spec.is_identity else dequantize_piece(parts, str(spec))


@quantize.in_pieces
def _quantize(x: Tensor, spec: str, direction: str, state: Tensor | None = None) -> list[Tensor]:
    if state is not None and state.ndim != 1:  # rows, or groups, have scales from elsewhere
        return of_rounded(quantize, x, spec, direction, state)  # type: ignore[no-any-return]
    return quantize_piece(x.mT if direction == "columnwise" else x, spec, state)


@hybrid_quantize.in_pieces
def _hybrid_quantize(
    x: Tensor, row: str, column: str, row_state: Tensor | None = None, column_state: Tensor | None = None
) -> list[Tensor]:
    return [*_quantize(x, row, "rowwise", row_state), *_quantize(x, column, "columnwise", column_state)]


@dequantize.in_pieces
def _dequantize(parts: Parts, spec: str, direction: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return cut_to_size(dequantize_piece(parts, spec), direction, size, dtype)
