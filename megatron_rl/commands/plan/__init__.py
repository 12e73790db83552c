"""The plan of a run before it starts: roles, memory of each rank and host, layouts that fit.

Importing this package imports no torch; counting the parameters of a model does.
"""
