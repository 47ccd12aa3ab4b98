"""Transports: ways to move tensors between ranks. All have the same interface."""
