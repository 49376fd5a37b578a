"""GEMMs of linear layers: `autograd` differentiates, `choice` picks, cuBLAS and Triton multiply."""
