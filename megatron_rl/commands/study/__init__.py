"""`megatron-rl study`: runs that are compared with each other, and with the published ones.

The format of a study's file is in docs/study.md. Folder of a study:

    start/<config>/                   start checkpoint of tiny models, made by the supervised stage
    <run>/seed-<n>[-repeat-<m>]/      output_dir of a run, with its log.txt; tells how far it is
    comparison.{json,md,png}          rewritten after every run
"""
