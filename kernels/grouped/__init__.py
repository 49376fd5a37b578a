"""Grouped GEMMs, as experts have them: `ops` has the operators, `reference` their meaning, the rest runs on a GPU."""
