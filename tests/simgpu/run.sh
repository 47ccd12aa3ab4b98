#!/usr/bin/env bash
# run.sh OUT COMMAND...: run a command whose processes see simulated GPUs. OUT is the
# folder of build.sh. README.md lists the variables that describe the GPUs.
set -euo pipefail
out=$(cd "$1" && pwd)
shift
export SIMGPU_OPS=$out/operators.txt SIMGPU_LIB=$out/liboperators.so
export SIMGPU_STATE=${SIMGPU_STATE:-$out/ledger}
export LD_LIBRARY_PATH=$out/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_PRELOAD=$out/libsimgpu.so${LD_PRELOAD:+:$LD_PRELOAD}
exec "$@"
