"""Elastic training, which survives a rank's death and a change of the world's size.

This file imports nothing: the notebook reads `checkpoint` and `commit_files`, which
need no torch. `nbdist.elastic` has the public names.
"""
