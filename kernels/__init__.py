"""The operators of a quantized graph: schemas, meaning, and what runs on a device. Knows nothing of recipes."""
