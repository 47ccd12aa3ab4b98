"""Telemetry: scalars that the ranks log, and samples of their devices.

On a rank, `recorder` takes scalars and `sampler` samples the device. Both are sent to
the notebook as one numbered stream of `wire.Batch` records, which `collector` keeps.
"""
