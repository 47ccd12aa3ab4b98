"""What the notebook and the ranks both use to talk: messages, files, placement."""
