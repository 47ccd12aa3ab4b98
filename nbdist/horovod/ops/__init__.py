"""Horovod's operations on tensors, one a file."""
