"""SHOW: what the notebook displays. Import a module of it only to open a view."""
