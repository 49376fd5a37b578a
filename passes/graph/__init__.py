"""Graphs of any kind: operators by name, values of nodes, axes behind views, bodies of higher-order operators."""
