"""Assert dtypes: has a program refuse tensors of other dtypes than it was made for.

    check = torch.ops.aten._assert_tensor_metadata.default(b_weight_data, None, None, torch.float8_e4m3fn)

Operators of fxquant know what their format says. ATen operators in their place do not: on tensors that `.half()` has
converted they read bits as those of another dtype, and give wrong numbers. Compiled code has no check left in it: torch
makes it where it finds shapes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from fxquant.passes.graph.meta import MODULE_STACK, STACK_TRACE, VAL

_ASSERT = torch.ops.aten._assert_tensor_metadata.default


def assert_dtypes(placeholders: Iterable[fx.Node]) -> None:
    """Puts a check of each one that is floating point in front of its first reader."""
    for node in placeholders:
        value = node.meta.get(VAL)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        first = min(node.users, default=None)
        if first is None or first.op == "output" or first.target is _ASSERT:
            continue
        with node.graph.inserting_before(first):
            check = node.graph.call_function(_ASSERT, (node, None, None, value.dtype))
        check.meta = {key: first.meta[key] for key in (MODULE_STACK, STACK_TRACE) if key in first.meta}
