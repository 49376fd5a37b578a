"""Inserting: writes the operators of quantized products into the captured graph, and binds state and weights to it."""
