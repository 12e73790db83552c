"""What a run will be, before it starts: ranks and roles, memory per rank, layouts that fit.

    roles       who does what on which rank, and the sizes of a step
    layout      parallel sizes: which divide a model, and why others do not
    parameters  parameters of each rank, exactly
    memory      bytes of a trainer rank, and whether a layout fits
    generator   bytes of a generator rank, and what its KV cache holds
    transfer    bytes and seconds of a weight update
    search      the layouts of a number of ranks, best first
    report      all of it as text and JSON; `cli` is `megatron-rl plan`, `dry_run` what
                `megatron-rl train --dry-run` prints

Importing this package imports no torch; counting the parameters of a model does.
"""
