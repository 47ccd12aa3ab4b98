"""`python -m nbdist doctor`, `demo` or `examples`."""

from nbdist.commands.main import main

if __name__ == "__main__":
    main()
