"""Code of both notebook and ranks: messages, files, shared memory, devices."""
