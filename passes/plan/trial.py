"""Trial: a user's quantizer quantizes a fake tensor of an operand's size while the graph is planned.

    int8 = Int8Quantizer()          # its columnwise half quantizes x in the place of x.mT
    # is refused before anything is written, with its layer, although only the backward would read that half

What would fail while autograd traces the graph, or give a gradient of the wrong shape, is told here by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fxquant.checks import article, first_line, place_of
from fxquant.compat.values import FakeTensorMode, version
from fxquant.errors import FxQuantWarning, RecipeError, tell
from fxquant.quantizers import Quantizer
from fxquant.roles import Direction


@dataclass(frozen=True)
class Tried:
    """An operand whose shape [*, M, K] a quantizer was tried with."""

    layer: str
    operand: str
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


def bits_an_element(quantizer: Quantizer, direction: Direction, operand: Tried) -> float:
    """Returns the bits that one direction of an operand takes for each of its elements, with scales and padding.

    Raises RecipeError, with layer, operand, quantizer and size, if the quantizer fails, or gives values of
    another shape.
    """
    *batch, rows, columns = operand.shape
    name = type(quantizer).__name__
    text = f"{[*batch, rows, columns]} {str(operand.dtype).removeprefix('torch.')}"
    where = f"layer {operand.layer or '<model>'!r}: {name}, {direction}, of {operand.operand} {text}"
    rows = 2 * rows if rows == columns else rows  # a half that is not transposed shows
    wanted = [*batch, rows, columns] if direction is Direction.ROWWISE else [*batch, columns, rows]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty([*batch, rows, columns], dtype=operand.dtype, device=operand.device)
        try:
            draws = (_no_bytes,) if quantizer.spec(direction).stochastic else ()
            with _without_state(quantizer):
                parts = quantizer.quantize_side(x, str(direction), *draws)
                values = quantizer.dequantize_side(parts, wanted[-1])
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from error
        except Exception as error:
            raise RecipeError(
                f"{where}: {type(error).__name__} {first_line(error)}{place_of(error)}. {_REMEDY}"
            ) from error
    if version(x):
        raise RecipeError(f"{where}: quantize writes into its input, which others read: copy it first")
    if not isinstance(values, Tensor) or values.is_complex() or values.dtype is torch.bool:
        answer = str(values.dtype) if isinstance(values, Tensor) else article(type(values).__name__)
        raise RecipeError(f"{where}: dequantize gave {answer}, and has to give a tensor of numbers")
    if values.device != x.device:
        raise RecipeError(f"{where}: its values are on {values.device}, and have to be on {x.device}")
    shape = list(values.shape)
    if shape[:-1] != wanted[:-1] or shape[-1] < wanted[-1]:
        hint = ": quantize x.mT for the columnwise half" if shape == [*batch, rows, columns] else ""
        raise RecipeError(f"{where}: its values are {shape} for {list(x.shape)}, and have to be {wanted}{hint}")
    return 8 * sum(part.numel() * part.itemsize for part in parts) / max(x.numel(), 1)


@contextmanager
def _without_state(quantizer: Quantizer) -> Iterator[None]:
    """A scope behind which a quantizer has the attributes that it had before, but for those that were None.

    A graph has only what it was traced with: a changed number, such as a count of calls, is told by a warning. Raises
    RecipeError for anything else that is changed.
    """
    attributes = getattr(quantizer, "__dict__", {})
    before = dict(attributes)
    yield
    after = dict(attributes)
    for name, value in after.items():
        old = before.get(name)
        if value is old or (old is None and not isinstance(value, Tensor)):
            continue
        if not isinstance(value, Tensor) and type(value) is type(old) and bool(value == old):
            continue
        attributes.clear()
        attributes.update(before)
        changes = f"changes its attribute {name!r} while it quantizes, and a graph is traced once"
        if not isinstance(value, int | float) or not isinstance(old, int | float):
            raise RecipeError(f"it {changes}: compute it in __init__, or of the tensor in each call")
        told = f"{type(quantizer).__name__} {changes}: it counts traces, and steps run with the number of theirs"
        tell(told, FxQuantWarning)


def _no_bytes(size: torch.Size) -> Tensor:
    """Stands for the random bytes of a quantizer that is tried."""
    return torch.zeros(size, dtype=torch.int64)


_REMEDY = "A format in blocks declares them as `alignment`, to which graphs pad"
