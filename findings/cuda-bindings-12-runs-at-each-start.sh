#!/usr/bin/env bash
# cuda-bindings 12.9 imports the package `cuda` in every Python process of its environment, also in those without CUDA.
#
# Versions: cuda-bindings 12.9.10 and 13.5.0, Python 3.11.
# Seen: 12.9 installs _cuda_bindings_redirector.pth. Each start of Python imports `cuda` by it, and gives that namespace
#   package another class, LazyCudaModule. 13.5 does neither.
# Expected: a package that nobody has imported is not in sys.modules, so its presence there says that CUDA is in use.
# A user sees tools that wait for the import of `cuda` take each process of the environment for one that uses CUDA:
# health checks, `python -c pass`, workers of other models. `cuda.bindings` is the name to wait for.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 12.9.10 13.5.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q --no-deps "cuda-bindings==$version"
    seen=$("$folder/$version/bin/python" -c "
import sys
print('cuda' in sys.modules, 'cuda.bindings' in sys.modules, type(sys.modules.get('cuda')).__name__)")
    echo "$version: $seen"
    case $version in
        12.*) [ "$seen" = "True False LazyCudaModule" ] || { echo "12.9 imports nothing at the start any more"; exit 1; } ;;
        *) [ "$seen" = "False False NoneType" ] || { echo "13.5 imports at the start, too"; exit 1; } ;;
    esac
done
