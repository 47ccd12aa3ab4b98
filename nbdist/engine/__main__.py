"""`python -m nbdist.engine`: what the MPI launcher starts for each rank."""

from nbdist.engine.bootstrap import main

main()
