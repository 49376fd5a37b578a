"""Casts: `ops` has the operators, `reference` their numerics, the Triton files what runs on a GPU."""
