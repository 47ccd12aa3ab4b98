"""Ways to move tensors between ranks, behind one interface."""
