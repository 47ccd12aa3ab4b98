"""The operations, one a module, and the checks of their arguments."""
