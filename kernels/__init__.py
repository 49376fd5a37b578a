"""The operators of a quantized graph: schemas, meaning, and what runs on a device. They know nothing of recipes.

A folder is a family of kernels. In each, `ops` has the operators, `reference` their meaning in plain torch, `autograd`
their derivatives, `choice` the conditions of kernels, and the other files what runs on devices.

cast       quantizes tensors, alone or with what produces them
state      updates the scales of delayed scaling
linear     GEMMs of linear layers
grouped    casts and GEMMs in groups, as experts have them
attention  attention in low precision
probe      what probes measure
custom     users' own quantizers
switched   products whose quantization is chosen when they run
onnx       the operators in ONNX

`operator` has what an operator is, `gluon_ring` what kernels of two families share, and `torch_in_range` puts torch's
own products into ranges of a profiler.
"""

from fxquant.kernels.attention import autograd as _attention  # noqa: F401  these imports register operators and kernels
from fxquant.kernels.grouped import autograd as _grouped  # noqa: F401
from fxquant.kernels.grouped import fp8 as _grouped_gemms  # noqa: F401
from fxquant.kernels.grouped import tensor_cores as _grouped_scales  # noqa: F401
from fxquant.kernels.linear import autograd as _linear  # noqa: F401
from fxquant.kernels.linear import cublas as _gemms  # noqa: F401
