"""What nbdist costs, each figure beside a peer's from the same run.

    python -m benchmarks              # all, and rewrite docs/benchmarks.md
    python -m benchmarks start cells  # some

Each benchmark is a module with a `main()` that measures, prints a table, and calls
`benchmarks.report.save`. Run them on an otherwise idle machine.
"""
