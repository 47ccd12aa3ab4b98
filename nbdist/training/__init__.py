"""What training on several ranks needs beyond torch: data, state, learning rates."""
