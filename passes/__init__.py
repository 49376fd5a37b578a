"""The passes over graphs. A folder is a kind of graph.

pipeline   every stage, in order, and why each pass stands where it does; `settings` is what all of them are given
captured   the passes over a captured graph and the facts that they hand on; `exported` those over a program
verify     the form of graphs at the borders of stages
look       snapshots of graphs between passes; `preview` has the last fusions on a copy, for reports

graph    for graphs of any kind, without a word of quantization: names, axes, bodies, small patterns
find     the captured graph, read only: every matmul as facts
plan     what becomes of each matmul: its layer, its quantizers, its decisions
insert   the captured graph, written: one operator for each product, bound to its state and its cached weights
joint    the joint graph of forward and backward: what is saved, and what is computed again
lower    forward and backward graphs: directions are paired, neighbours fused, operators replaced by kernels
export   exported programs: weights are stored quantized, scales calibrated
"""
