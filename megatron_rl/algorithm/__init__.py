"""The algorithm as data: settings, and the math of each of them.

`settings` and `schedule` are sections of the configuration; so is each loss and correction, with
its math as a method. Nothing here imports torch: losses use the methods of their tensors.
Advantages, weights, length control and curriculum are numpy and run in the orchestrator.
"""
