"""The plan of a run before it starts: roles, memory of each rank, layouts that fit.

    layouts     parallel sizes: division of a model, and the search for sizes that fit
    memory      bytes of a trainer rank and of a generator rank
    plan_report     the memory plan as text and JSON
    cli, dry_run    `megatron-rl plan`, `megatron-rl train --dry-run`

Importing this package imports no torch; counting the parameters of a model does.
"""
