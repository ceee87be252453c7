#!/usr/bin/env bash
# What is claimed of vLLM on a GPU, measured on a machine with one; a phase is a call of at most ten minutes.
#     CRIU=criu MODEL=DIR LARGE=DIR OUT=results bash tests/gpu/vllm_run.sh life|image|large|hand ...
# life   MODEL, artifact and store on a disk: three hot restores with tokens/s before and after, a capture that keeps its
#        workload and a clone beside it, asked in turns, three rounds of sleep and wake, two captures that fail after their
#        dump, two restores at once, three cold restores; every answer and every tensor compared        0.6B: about 400 s
# image  MODEL: the same image uncompressed, without zero pages, in LZ4 blocks; hot and cold               0.6B: about 330 s
# large  LARGE, all in memory: as life, without what needs a disk                                          8B: about 450 s
# hand   LARGE frozen and thawed by hand, with vLLM's sleep level 2 and a reload: the rival                8B: about 150 s
# Engines' caches of compiled code are below DISK and RAM, and are warm from the second phase on.
# PYTHON has vLLM and this library (python3). DISK and RAM are directories on a disk and on a tmpfs that is not /dev/shm.
# WEIGHTS is weights.mode (native; auto for a rehearsal without a GPU). ENGINE_ENV has more NAME=VALUE for the engine,
# ENGINE_ARGS are its arguments; MINUTES is how long parts of a phase may begin, LIMIT the seconds after which it is ended.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}; criu=${CRIU:?the CRIU to use}; out=${OUT:-results}; mkdir -p "$out"
disk=${DISK:-/var/tmp}/coldsnap-vllm; ram=${RAM:-/ram}/coldsnap-vllm
read -ra engine <<< "${ENGINE_ARGS:---max-model-len 2048 --max-cudagraph-capture-size 8 --gpu-memory-utilization 0.3}"
env=(); for one in ${ENGINE_ENV:-}; do env+=(--env "$one"); done
# What this library sets for an engine that it launches, and nobody for the rival's.
bare=(); for one in PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False NCCL_IB_DISABLE=1 NCCL_RAS_ENABLE=0; do bare+=(--env "$one"); done
common=(--criu "$criu" --python "$(command -v "$python")" "${env[@]}")
began=$SECONDS
say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - began)); }
# Only its table, and what went wrong; all of it is in the log.
qualify() { local name=$1 script=$2; shift 2
  PYTHONUNBUFFERED=1 timeout "${LIMIT:-540}" "$python" "examples/$script" "${common[@]}" --json "$out/$name.json" "$@" > "$out/$name.log" 2>&1 \
    || echo "$name: status $?"
  grep -E 'DIFFERENT|FAILED|failed|Error' "$out/$name.log" | cut -c1-300
  sed -n '/kernel\|^| way/,$p' "$out/$name.log" | cut -c1-200 | tail -70; }
living=(--keep --sleep-wake 3 --undo dump --undo seal --clones 2 --cold-starts 0 --no-by-hand --weights "${WEIGHTS:-native}")

for phase in "$@"; do
  say "$phase"
  case $phase in
  life)
    rm -rf "$disk"/{artifact,store,kept,undone}
    qualify life qualify_vllm.py --model "${MODEL:?}" --work "$disk" --minutes "${MINUTES:-8}" "${living[@]}" --cold-restores 3 -- "${engine[@]}" ;;
  image)
    rm -rf "$disk-images"  # it must hold no artifacts
    qualify image qualify_image.py --model "${MODEL:?}" --work "$disk-images" --repeats "${REPEATS:-3}" --workers "${WORKERS:-1,4,16}" \
      --env "VLLM_CACHE_ROOT=$disk/cache" -- "${engine[@]}" ;;
  large)
    rm -rf "$ram"/{artifact,store,kept,undone}
    qualify large qualify_vllm.py --model "${LARGE:?}" --work "$ram" --minutes "${MINUTES:-7}" "${living[@]}" --cold-restores 0 --steady-tokens 512 \
      -- "${engine[@]}" ;;
  hand)
    timeout "${LIMIT:-400}" "$python" examples/by_hand.py --model "${LARGE:?}" --work "$ram-by-hand" --criu "$criu" --python "$(command -v "$python")" \
      "${env[@]}" "${bare[@]}" --json "$out/hand.json" -- "${engine[@]}" > "$out/hand.log" 2>&1 || echo "hand: status $?"
    tail -40 "$out/hand.log" ;;
  *) echo "no such phase: $phase" ;;
  esac
done
say done
