#!/usr/bin/env bash
# Collect what hydration_run.sh needs on a GPU machine that can download nothing: wheels for Python 3.12, about 13 MiB.
#     bash tests/gpu/hydration_kit.sh .kit/hydration
set -euo pipefail
out=${1:?where to}
mkdir -p "$out"
platforms=()
for p in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${p}_x86_64")
done
# The comparison's rivals, and the small pure packages that they and coldsnap import.
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$out" \
  instanttensor==0.2.2 fastsafetensors==0.5.0 runai-model-streamer==0.17.1 humanize \
  attrs cattrs psutil lz4 pytest pytest-timeout pluggy iniconfig packaging pygments typing_extensions hypothesis sortedcontainers
du -sh "$out"
