#!/bin/bash
# Asks a shard's metrics port whether it is healthy: exit status 0 if it serves, 1 if not or if it does not answer. Prints
# what it says, also of /metrics: the images have no curl.
#
#     health.sh HOST PORT [/healthz|/readyz|/metrics]
#
# For probes, which run every few seconds: it takes a hundredth of the processor time of `weightserver health`, which
# starts Python and also tests gRPC and TLS.
set -u
host=${1:?host} port=${2:?port} path=${3:-/healthz}
exec 3<>"/dev/tcp/$host/$port" || exit 1
printf 'GET %s HTTP/1.0\r\nHost: %s\r\n\r\n' "$path" "$host" >&3
read -r -t 5 _ status _ <&3 || exit 1
while IFS= read -r -t 5 line <&3 && [[ $line != $'\r' ]]; do :; done
timeout 5 cat <&3
[[ $status == 200 ]]
