"""The views that a notebook displays. A module is imported when its view is opened."""
