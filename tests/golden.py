"""Reads the golden vectors in the folder of this name; its README says what the keys mean."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Sequence
from functools import cache
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from fxquant.formats import QuantSpec

FOLDER = Path(__file__).parent / "golden"
DEVICE = os.environ.get("FXQUANT_GOLDEN_DEVICE", "cpu")
"""Where the vectors are put, and so where the tests that use them run."""
ON_DEVICE: dict[str, tuple[str, ...]] = {
    "kernels/cast/test_reference.py": (
        "test_per_tensor", "test_per_row", "test_blocks_of_128", "test_mxfp8", "test_nvfp4", "test_nvfp4_stochastic",
        "test_nvfp4_global_scales", "test_dequantize", "test_columns_from_dequantized_rows", "test_gemms",
    ),
    "test_delayed.py": ("test_update_is_golden", "test_quantize_by_a_given_scale_is_golden"),
}  # fmt: skip
"""The tests that `gpu/test_vectors.py` runs again with every vector on a GPU, by file; `test_golden.py` reads them."""


@cache
def load(name: str) -> dict[str, Tensor]:
    """All vectors of a kind; where they are split over several files, ``<name>_*``, those of each."""
    paths = [FOLDER / f"{name}.safetensors"]
    if not paths[0].exists():
        paths = sorted(FOLDER.glob(f"{name}_*.safetensors"))
    return {key: value for path in paths for key, value in load_file(path, DEVICE).items()}


def source(name: str) -> Tensor:
    """The input of a name: a shared one, or one that a single file brings along."""
    for file in ("inputs", "special", "variants"):
        vectors = load(file)
        for key in (name, f"in/{name}"):
            if key in vectors:
                TABLES.add((file, key))
                return vectors[key]
    raise KeyError(name)


TABLES: set[tuple[str, str]] = set()
"""The (file, key) that the tables of the tests have taken: `test_golden.py` asks whether any is left."""


def keys(
    file: str, *parts: str, under: str = "", reads: Sequence[str] = (), only: Container[str] | None = None
) -> list[str]:
    """What stands before the last part of each key of a file that ends in one of `parts`, beneath `under`.

    With `only`, those of its configurations. A test that is given one reads `parts` and, where they are, `reads`.
    """
    found = [key.rpartition("/") for key in load(file)]
    stems = {
        stem for stem, _, part in found
        if part in parts and stem.startswith(under) and (only is None or stem.split("/")[-1] in only)
    }  # fmt: skip
    TABLES.update((file, f"{stem}/{part}") for stem, _, part in found if stem in stems and part in (*parts, *reads))
    return sorted(stems)


def taken(file: str, pattern: str) -> None:
    """Says that a test reads the keys which match a regular expression as a whole."""
    TABLES.update((file, key) for key in load(file) if re.fullmatch(pattern, key))


SPECS: dict[str, QuantSpec] = {
    "block1d": QuantSpec(format="block_1x128_e4m3", pow2=True),
    "block1d:f32": QuantSpec(format="block_1x128_e4m3"),
    "block2d": QuantSpec(format="block_128x128_e4m3", pow2=True),
    "block2d:f32": QuantSpec(format="block_128x128_e4m3"),
    "mx2d:e4m3": QuantSpec(format="mxfp8_2d_e4m3"),
    "nv": QuantSpec(format="nvfp4"),
    "nv2d": QuantSpec(format="nvfp4_2d"),
    "nvrht": QuantSpec(format="nvfp4", rht=True),
    "nvrs": QuantSpec(format="nvfp4", row_scaled=True),
}
"""By the names of operands in the `dequant`, `hybrid` and `gemm` vectors."""
for _element in ("e4m3", "e5m2"):
    SPECS |= {
        f"tensor:{_element}": QuantSpec(format=f"per_tensor_{_element}"),
        f"tensor:{_element}:pow2": QuantSpec(format=f"per_tensor_{_element}", pow2=True),
        f"rows:{_element}": QuantSpec(format=f"per_row_{_element}"),
        f"rows:{_element}:ao_pow2": QuantSpec(format=f"per_row_{_element}", pow2=True, torchao=True),
        f"mx:{_element}": QuantSpec(format=f"mxfp8_{_element}"),
    }
