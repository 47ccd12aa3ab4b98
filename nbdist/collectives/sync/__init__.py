"""How ranks wait for each other: barriers, semaphores, shared memory, CUDA events."""
