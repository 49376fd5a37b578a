"""Facts that torch has inside and does not say, and what it leaves to whoever knows them: a file for each part of it.

memory       writes into a tensor's memory, as far as they can be seen
checkpoints  the activation checkpoints around a call
functions    the custom functions that run
copied       what torch leaves out of a copy of a module
frames       the frame that Dynamo compiles, and guards of our own on its graphs
recompiles   why a function is compiled again, and where its graphs break
ranks        the ranks of a process group
placements   the part of a DTensor that a rank holds
fsdp         the gather that FSDP2 makes of a parameter
subclass     what a subclass of Tensor needs
"""
