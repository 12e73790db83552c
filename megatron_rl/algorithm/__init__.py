"""The algorithm as data: its settings, and the plain maths behind each of them.

`settings` and `schedule` are sections of the configuration; a loss or a correction is the section
that names it, with the maths as its method. Nothing here imports torch: losses work on whatever
tensors they are given. Advantages, weights, filters, curriculum and interruption are numpy and run
in the orchestrator.
"""
