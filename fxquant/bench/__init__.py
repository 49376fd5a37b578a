"""Benchmarks beside bf16 Inductor and torchao in one run: `python -m fxquant bench`."""
