#!/usr/bin/env bash
# build.sh PYTHON OUT: compile the simulated GPU for the CUDA build of torch that PYTHON
# has, into the folder OUT. It needs g++, and takes about a minute.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
torch=$packages/torch
# torch's wheels bring CUDA's headers; Triton's has the compiler's part of them.
headers=(-isystem "$(ls -d "$packages"/nvidia/cu*/include | head -1)"
    -isystem "$packages/nvidia/nccl/include"
    -isystem "$packages/triton/backends/nvidia/include"
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include")

# nccl.h includes headers of narrow numbers, which need nvcc; it uses none of them.
headers+=(-D__CUDA_FP16_H__ -D__CUDA_BF16_H__ -D__CUDA_FP8_H__)

runtime=("$here"/src/{config,ledger,runtime}.h "$here"/src/{ledger,devices,errors}.cpp
    "$here"/src/{streams,graphs,events,memory,virtual_memory,kernels,driver,nvml}.cpp "$here"/src/nccl/*)

newer() {  # TARGET SOURCE...: whether a source is newer than the target
    local target=$1 source
    for source in "${@:2}"; do
        [ "$target" -nt "$source" ] || return 0
    done
    return 1
}

if newer "$out/libsimgpu.so" "${runtime[@]}" "$here/build.sh"; then
    g++ -O2 -g1 -std=c++17 -Wall -Wextra -fPIC -fvisibility=hidden -shared \
        $(printf '%s\n' "${runtime[@]}" | grep '\.cpp$') -I "$here/src" \
        "${headers[@]}" -o "$out/libsimgpu.so.new" -lpthread -ldl
    mv "$out/libsimgpu.so.new" "$out/libsimgpu.so"
fi
if newer "$out/liboperators.so" "$here/src/operators.cpp" "$here/build.sh"; then
    g++ -O1 -std=c++20 -fPIC -shared "$here/src/operators.cpp" "${headers[@]}" \
        -o "$out/liboperators.so.new" \
        -L"$torch/lib" -ltorch -ltorch_cpu -ltorch_cuda -lc10 -lc10_cuda -ldl
    mv "$out/liboperators.so.new" "$out/liboperators.so"
fi
# The driver's and NVML's functions are in the same library.
mkdir -p "$out/lib"
ln -sf ../libsimgpu.so "$out/lib/libcuda.so.1"
ln -sf ../libsimgpu.so "$out/lib/libnvidia-ml.so.1"
cmp -s "$here/plugin/simgpu.py" "$packages/simgpu.py" || {
    plugin=$(mktemp -d)
    cp "$here"/plugin/* "$plugin"
    "$python" -m pip install --quiet --no-deps --force-reinstall "$plugin"
    rm -rf "$plugin"
}
if newer "$out/operators.txt" "$here/list_operators.py"; then
    env -u SIMGPU_LIB "$python" "$here/list_operators.py" "$out/operators.txt"
fi
