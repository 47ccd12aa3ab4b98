"""How ranks wait for each other: barriers, semaphores, shared segments, CUDA events."""
