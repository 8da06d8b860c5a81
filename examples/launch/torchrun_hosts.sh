#!/usr/bin/env bash
# One run over several hosts, without a scheduler. Start it on each of them, with the same first argument:
#
#   bash examples/launch/torchrun_hosts.sh first-host:29400 --model DIR --data chats.jsonl
#
# HOSTS: how many there are (2), or a range such as 2:4, of which any number may come. GPUS: processes on each (all GPUs).
# NAME: of this run; two runs with the same first host need two names. The directories are on a disk that all hosts see.
# FIRST: 1 on the first host and 0 on the others, where torchrun can't tell by their names. ADDRESS: this host's own, likewise.
# ZERO3_RING_DIR: where each rank leaves its last transfers. If the run hangs, python -m zero3 hang there says which rank is behind.
# --fast-output DIR: a disk of each host's own, for checkpoints that are made often; a restart reads those first.
# A host that dies ends the step everywhere; torchrun starts all processes anew, which go on from the newest whole checkpoint.
set -euo pipefail
cd "$(dirname "$0")/../.."

rendezvous=${1:?the address of the first host, as host:port}
shift
gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count() or 1)')}

# Each attempt has a store of its own: a process that is started anew must not meet that of the one before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) / gpus > 0 ? $(nproc) / gpus : 1))}

timing=last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=5
exec python -m torch.distributed.run \
    --nnodes "${HOSTS:-2}" --nproc-per-node "$gpus" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$rendezvous" --rdzv-id "${NAME:-sft}" \
    --rdzv-conf "${FIRST:+is_host=$FIRST,}$timing" ${ADDRESS:+--local-addr "$ADDRESS"} \
    examples/sft.py --timeout "${TIMEOUT:-300}" --resume "$@"
