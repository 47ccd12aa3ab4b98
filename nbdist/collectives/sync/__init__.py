"""Waits for other ranks: barriers, semaphores, shared segments, CUDA events."""
