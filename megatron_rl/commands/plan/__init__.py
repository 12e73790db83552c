"""The plan of a run before it starts: roles, memory of each rank and host, layouts that fit.

    layouts         parallel sizes: division of a model, and the search for sizes that fit
    tensors         tensors of a trainer rank, and those that travel as an update
    nodes           ranks by node, and the nodes that keep versions of the weights
    update_memory   buffers and seconds of an update
    host_memory     bytes of a node's host
    memory          bytes of a trainer rank and of a generator rank; whether all fits
    plan_report     the memory plan as text and JSON
    cli, dry_run    `megatron-rl plan`, `megatron-rl train --dry-run`

Importing this package imports no torch; counting the parameters of a model does.
"""
