"""The joint graph: says what the forward saves for the backward, then torch's partitioner cuts."""
