"""Ablations as one command: recipes x seeds on the tiny task, each fitted, and one comparison.

    runs.py     one run after the other, as processes of their own; resumable, with a budget
    results.py  fits of every run and of every recipe's seeds together; table, picture, JSON
    tiny.yaml   sizes of the tiny task; everything else is the recipe's

Folder of an ablation:

    ablation.json                 what was asked for; another ablation in the same folder is refused
    start/                        the supervised stage's checkpoint that all runs start from
    <recipe>/seed-<n>/            output_dir of a run, with its log.txt; `done.json` when it is over
    comparison.{json,md,png}      written after every run that ends
"""
