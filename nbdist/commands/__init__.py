"""What `python -m nbdist` does from a shell."""
