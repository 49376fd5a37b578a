"""The invariants of TransformerEngine's own tests, by number, and which of them tests of this project hold.

A test says in its docstring which invariants it holds ("Invariants 2 and 49"). Where none does, or where they hold a
part only, `INVARIANTS` says why. `docs/te_invariants.md` is generated from here.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
_MENTION = re.compile(r"\bInvariants? (\d+(?:(?:, | and |, and )\d+)*)")


@dataclass(frozen=True)
class Invariant:
    """What must hold, and what of it is not tested.

    `untested` begins with ``No meaning:`` where it speaks of what only TransformerEngine's modules have, with
    ``Waits for`` what this version does not do yet, or with ``Partly:`` where tests hold the rest.
    """

    text: str
    untested: str = ""


INVARIANTS: dict[int, Invariant] = {
    1: Invariant("A factory that repeats a built-in recipe gives its bits: output, dgrad, wgrad and bias gradient"),
    2: Invariant("A high-precision factory gives the bits without any recipe"),
    3: Invariant("A grouped custom recipe equals grouped current scaling, with gradients times 1e8 and 1e-8"),
    4: Invariant("A linear asks its factory once each for input, weight and grad_output, not for results"),
    5: Invariant("Each operand has a quantizer and state of its own"),
    6: Invariant("Names of modules reach the roles; grouped linears are `grouped_linear`"),
    7: Invariant(
        "Attention has 9 forward and 6 backward slots, each with its tensor type",
        "Partly: each type is asked for once, since there are no positions to fill",
    ),
    8: Invariant("MXFP8 attention makes no delayed state"),
    9: Invariant(
        "Roles that are missing, unknown or None are answered by their position",
        "Partly: factories answer them, but every operand has a role, so there are no positions",
    ),
    10: Invariant("Equal roles keep their quantizers; scales and histories stay the same tensors when roles change"),
    11: Invariant("None from a factory is an error that names slot and role"),
    12: Invariant(
        "The alignment asks no factory, must be positive, and pads splits to its multiples",
        "Partly: rows are padded inside, where a format needs it, and not by a recipe",
    ),
    13: Invariant("2-d MXFP8 is for roles that say weight"),
    14: Invariant("4over6 is for weights, activations or both, never for gradients"),
    15: Invariant("A request becomes a quantizer that reads its place of the scales and records at its place"),
    16: Invariant("With delayed and other quantizers mixed, the state has the size of the delayed ones"),
    17: Invariant("Requests that disagree are an error that names the field"),
    18: Invariant("The history of several steps equals that of built-in delayed scaling"),
    19: Invariant("Scales follow the formula for margins, lengths of history, max and most_recent"),
    20: Invariant("An amax of 0, inf or nan keeps the scale, a tiny one gives the largest float"),
    21: Invariant(
        "The amax of a weight moves only when the weight is really quantized",
        "Partly: weights that are stored quantized have no delayed scales, others are quantized in each forward",
    ),
    22: Invariant("A change of the recipe's class warns once"),
    23: Invariant("A change of the history's length resizes it"),
    24: Invariant("A hybrid of one format equals the plain quantizer, on any operands"),
    25: Invariant("With three formats, fprop, dgrad and wgrad are those of the three plain recipes"),
    26: Invariant("Formats that do not multiply are an error"),
    27: Invariant("An identity column from the dequantized rows is the dequantized rows"),
    28: Invariant("The column from the dequantized rows is the same when only the column is asked for"),
    29: Invariant("An update takes the column from the updated row"),
    30: Invariant("Saving the original input or its quantized half gives the same result"),
    31: Invariant(
        "Where the original input cannot be saved, a warning says so and nothing else changes",
        "No meaning: the partitioner decides what is saved, and may save either",
    ),
    32: Invariant("A high-precision backward needs no quantizer that can be repeated"),
    33: Invariant("MXFP8 with a high-precision backward in the factory equals the dequantized override"),
    34: Invariant(
        "Asking for a direction that is absent raises and changes nothing",
        "Partly: it raises; a quantized tensor never changes",
    ),
    35: Invariant("Views share buffers but not which directions they have"),
    36: Invariant("What is saved for the backward is restored exactly"),
    37: Invariant("A copy of a quantizer keeps its settings"),
    38: Invariant("A real slice is dequantized, a full one keeps its type"),
    39: Invariant("The no-op flag leaves both directions as they are"),
    40: Invariant("A hybrid of one object twice, of a request, or with an unknown source is refused when it is made"),
    41: Invariant("Experts that disagree are an error before any GEMM"),
    42: Invariant("Quantizing splits at once equals quantizing each"),
    43: Invariant("Weights made quantized stay so through steps of the optimizer"),
    44: Invariant("Checkpoints are exact, and training resumed from one equals training that went on"),
    45: Invariant("Recomputed activations give the bits of saved ones"),
    46: Invariant("Saved tensors that were moved away and back are the same"),
    47: Invariant("A gathered parameter under FSDP2 dequantizes to the gathered shards"),
    48: Invariant("Attention by a factory equals attention by its recipe"),
    49: Invariant("Identities everywhere give the bits of the model without a recipe, for each kind of layer"),
    50: Invariant("Identities on gradients give both overrides of the backward"),
    51: Invariant(
        "An identity casts if asked; it is refused in FP8 attention and beside quantized experts",
        "Partly: experts have one quantizer for all of them",
    ),
    52: Invariant("An amax of 448 times 2^k has the scale code 127 + k; code 0 is 2^-127 and 255 NaN"),
    53: Invariant("One direction alone is half of both"),
    54: Invariant("2-d MXFP8 has tiles of 32x32 and the same bytes in both directions"),
    55: Invariant("Swizzled scales are a permutation of plain ones"),
    56: Invariant("Quantizing a group equals quantizing each of its tensors"),
    57: Invariant("NVFP4 is bit-exact: payload, block scales and amax, 1-d and 2-d, ragged, zero, non-contiguous"),
    58: Invariant("The column half of 2-d NVFP4 alone is that of both"),
    59: Invariant("The Hadamard transform is bit-exact to the product with its matrix"),
    60: Invariant("Stochastic rounding goes to one of two neighbours and is right on average; seeds repeat it"),
    61: Invariant("A row-scaled NVFP4 GEMM equals the product of its dequantized operands"),
    62: Invariant("4over6 takes 4 only where that is strictly better"),
    63: Invariant("The column of 1-d FP8 blocks is quantized from the source, that of 2-d is the transposed row"),
    64: Invariant("Quantizers are values; process groups are refused; fake tensors have the real shapes"),
    65: Invariant("FP8 attention that cannot be compiled falls back, and says so, with the result unchanged"),
    66: Invariant("Extra state is read without pickles"),
}


def tests() -> dict[int, list[tuple[str, str]]]:
    """For each invariant the (file, name) of the tests whose docstrings mention it."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if _MENTION.search(text) else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                mentions = _MENTION.findall(ast.get_docstring(node) or "")
                for number in sorted({int(n) for text in mentions for n in re.findall(r"\d+", text)}):
                    found.setdefault(number, []).append((path.relative_to(TESTS).as_posix(), node.name))
    return found


def rows() -> list[dict[str, str]]:
    """The table of the documentation."""
    held = tests()
    return [
        {
            "no.": str(number),
            "invariant": invariant.text,
            "tests": "<br>".join(f"`{file}`: `{name}`" for file, name in held.get(number, [])) or "none",
            "not tested": invariant.untested,
        }
        for number, invariant in INVARIANTS.items()
    ]
