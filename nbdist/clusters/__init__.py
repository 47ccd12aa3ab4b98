"""Starts, uses and stops the ranks of a cluster, from the notebook's process."""
