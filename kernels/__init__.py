"""The operators of a quantized graph: schemas, meaning, and what runs on a device. Knows nothing of recipes."""

from fxquant.kernels import grouped as grouped  # they register the operators
from fxquant.kernels import linear as linear
