"""Finding: reads a captured graph and gives every matmul as a `Match`. `walk` begins; `forms` lists the spellings."""
