"""Delayed scaling's update of amax history and scales: the reference, and the Triton kernel."""
