"""Probes: statistics of operands inside a graph; `reference` has their meaning, `plan` their order."""
