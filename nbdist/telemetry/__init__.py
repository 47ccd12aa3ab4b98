"""What the ranks log, and how it reaches the notebook.

On a rank, `recorder` takes scalars and `sampler` watches the device; both end in one
numbered stream of `wire.Batch` records. In the notebook, `collector` keeps them.
"""
