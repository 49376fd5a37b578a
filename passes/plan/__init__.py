"""Planning: names the layer of each match, asks the recipe, and decides what is quantized and why not."""
