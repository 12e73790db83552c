"""`megatron-rl ablate`: recipes x seeds on the tiny task, each run fitted, and one comparison.

Folder of an ablation:

    ablation.json                 settings; another ablation in the same folder is rejected
    start/                        start checkpoint of all runs, made by the supervised stage
    <recipe>/seed-<n>/            output_dir of a run, with its log.txt; `done.json` at its end
    comparison.{json,md,png}      rewritten after every run
"""
