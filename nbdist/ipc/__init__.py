"""What the notebook and the ranks both use: messages, files, shared memory, devices."""
