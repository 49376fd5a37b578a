"""The state of delayed scaling in forward and backward graphs: its amaxes are batched, its scales advanced in place."""
