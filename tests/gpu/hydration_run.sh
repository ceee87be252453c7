#!/usr/bin/env bash
# Everything that is claimed about native I/O on a GPU, measured on a machine with one, most doubtful first.
#     OUT=results bash tests/gpu/hydration_run.sh KIT [shape] [limits] [compare] [cold] [capture] [tests]
# KIT: the folder that hydration_kit.sh filled. Without phases: all of them, in this order.
#   shape    which threads, slices and ways reach the link from tmpfs and from a hot page cache, 8 GB     about 100 s
#   limits   the chosen setting at 8 and 16 GB, verified and not, against the link                         about 40 s
#   compare  the other loaders on the same file, tmpfs and disk, hot                                       about 60 s
#   cold     the disk, page cache dropped, against a raw reader                                            about 40 s
#   capture  memory to a durable file, against disk and link                                               about 40 s
#   tests    memory provider conformance, equality and leaks on the real driver                            about 30 s
set -u
cd "$(dirname "$0")/../.."
kit=${1:?the folder with the wheels}; shift
phases=${*:-shape limits compare cold capture tests}
results=${OUT:-results}; mkdir -p "$results"
bytes=${BYTES:-8GB}; disk=${DISK:-/var/tmp}/coldsnap-qualify; shm=/dev/shm/coldsnap-qualify
work=$(mktemp -d); out=$work/out; mkdir -p "$disk" "$shm" "$out"
# One file comes back, whatever ran.
trap 'tar -C "$work" -czf "$results/hydration_${phases// /_}.tar.gz" out; rm -rf "$work" "$disk" "$shm"' EXIT
began=$SECONDS
say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - began)); }

say build
mkdir "$work/site"
for wheel in "$kit"/*.whl; do python3 -m zipfile -e "$wheel" "$work/site" || exit 1; done  # an environment may come without pip
for part in "$work"/site/*.data/*lib; do [ -d "$part" ] && cp -r "$part"/. "$work/site"/; done
cmake -S csrc -B "$work/build" > "$out/build.log" 2>&1 && cmake --build "$work/build" --parallel "$(nproc)" >> "$out/build.log" 2>&1 \
  || { tail -20 "$out/build.log"; exit 1; }
export PYTHONPATH="$work/site:src" PYTHONUNBUFFERED=1
library=$work/build/libcoldsnap_io.so
hydration() { local name=$1; shift
  timeout "${LIMIT:-150}" python3 examples/qualify_hydration.py --library "$library" --device 0 --keep --json "$out/$name.json" "$@" 2> "$out/$name.log" \
    || { echo "$name: status $?"; tail -8 "$out/$name.log"; }; }

for phase in $phases; do
  say "$phase"
  case $phase in
  shape)
    # One number first: what the library does when nobody chooses anything.
    hydration default --bytes $bytes --directory $shm --directory $disk --caches hot --backends auto --verifications none,crc32 \
      --chunks 64MiB --depths 4 --skip-host
    for place in $shm $disk; do
      hydration "shape_${place//\//_}" --bytes $bytes --directory $place --caches hot --backends buffered --verifications none --skip-host \
        --accesses read,map --chunks 64MiB --depths 16 --slices 256KiB,512KiB,1MiB,2MiB,4MiB,16MiB --threads 8,12,16,24,32 \
        --repeat 2 --shown 14
      hydration "register_${place//\//_}" --bytes $bytes --directory $place --caches hot --backends buffered --verifications none --skip-host \
        --accesses register --chunks 256MiB --depths 64 --slices 8MiB,32MiB,128MiB --threads 4,8,16 --repeat 2 --shown 4
    done ;;
  limits)
    for amount in $bytes ${BYTES2:-16GB}; do
      hydration "limits_$amount" --bytes $amount --directory $shm --directory $disk --caches hot --backends auto,direct --skip-host \
        --chunks ${CHUNKS:-64MiB} --depths ${DEPTHS:-4} --slices ${SLICES:-0} --threads ${THREADS:-0} --repeat 5
    done ;;
  compare)
    hydration compare --bytes $bytes --directory $shm --directory $disk --caches hot --backends auto --verifications none --skip-host \
      --chunks ${CHUNKS:-64MiB} --depths ${DEPTHS:-4} --slices ${SLICES:-0} --threads ${THREADS:-0} --compare ;;
  cold)
    hydration cold --bytes ${COLD:-2GB} --cold-bytes ${COLD:-2GB} --directory $disk --caches cold --backends auto,direct --verifications none --skip-host \
      --chunks 1MiB,4MiB,64MiB --depths 4,16 --repeat 2 ;;
  capture)
    timeout 150 python3 examples/qualify_capture.py --library "$library" --device 0 --bytes ${CAPTURE:-4GB} --directory $disk --directory $shm \
      --chunks 64MiB --depths 4,16 --backends auto,buffered --repeat 2 --json "$out/capture.json" 2> "$out/capture.log" \
      || { echo "capture: status $?"; tail -8 "$out/capture.log"; } ;;
  tests)
    COLDSNAP_TEST_LIBRARY=$library timeout 150 python3 -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . \
      tests/gpu/hydration_device.py 2>&1 | tail -15 | tee "$out/tests.log" ;;
  *) echo "no such phase: $phase" ;;
  esac
done
say done
