"""Attention in low precision: `ops` has the operators, `reference` their meaning, the rest runs on a GPU."""
