#!/bin/sh
# Run an engine image so that ColdSnap works in it: docker or podman, one GPU or none.
#
#   MODELS=/srv/models ARTIFACTS=/srv/artifacts sh run.sh IMAGE MODEL NAME [ENGINE ARGUMENTS]
#
# MODEL is a directory below MODELS, NAME the artifact's directory below ARTIFACTS. Set ENGINE_RUNTIME to podman, GPUS to
# the value of --gpus, PORT, SHM, POLICY (a file) as you need them. docs/deploy.md says what each capability is for.
set -eu

image=$1 model=$2 name=$3
shift 3

# The capabilities beyond Docker's own set: namespaces and dumps; CRIU's start; the clock of a restore; ptrace under Yama.
set -- \
    --cap-add SYS_ADMIN --cap-add NET_ADMIN --cap-add SYS_TIME --cap-add SYS_PTRACE \
    --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
    --shm-size "${SHM:-16g}" \
    --publish "${PORT:-8000}:8000" \
    --volume "${MODELS:?the directory of models}:/models:ro" \
    --volume "${ARTIFACTS:?a directory for artifacts, on a fast disk}:/artifacts" \
    ${GPUS:+--gpus "$GPUS"} \
    ${POLICY:+--volume "$POLICY:/policy.toml:ro"} \
    "$image" \
    python3 /opt/serve.py "/models/$model" "/artifacts/$name" --store /artifacts/store --criu /opt/criu/criu \
    ${POLICY:+--policy /policy.toml} -- "$@"

# The run time of --stop-timeout is how long the engine may take to end after SIGTERM.
exec "${ENGINE_RUNTIME:-docker}" run --rm --stop-timeout 60 "$@"
