#!/bin/bash
# Asks a shard's metrics port whether it is healthy: exit status 0 if it serves, 1 if not or if it does not answer. Prints
# what it says, also of /metrics: the images have no curl.
#
#     health.sh HOST PORT [/healthz|/readyz|/metrics [TIMES]]
#
# With TIMES it kills a shard that has answered and then does not, TIMES times in a row, so that its supervisor starts it
# again: Docker restarts no container for being unhealthy. The shard is the process that has --metrics-port=PORT.
#
# For probes, which run every few seconds: it takes a hundredth of the processor time of `weightserver health`, which
# starts Python and also tests gRPC and TLS.
set -u
host=${1:?host} port=${2:?port} path=${3:-/healthz} times=${4:-0}
asked=${TMPDIR:-/tmp}/asked-$port # a line for each question since the last answer; no file before the first one
if ((times)) && [[ -e $asked ]]; then
    echo >>"$asked"
    if (($(wc -l <"$asked") > times)); then
        rm "$asked"
        for process in $(grep -lsxz "[-]-metrics-port=$port" /proc/[0-9]*/cmdline); do
            process=${process#/proc/}
            kill -KILL "${process%/cmdline}"
        done
        echo "no answer, $times times: killed"
        exit 1
    fi
fi
exec 3<>"/dev/tcp/$host/$port" || exit 1
printf 'GET %s HTTP/1.0\r\nHost: %s\r\n\r\n' "$path" "$host" >&3
read -r -t 5 _ status _ <&3 || exit 1
((times)) && : >"$asked"
while IFS= read -r -t 5 line <&3 && [[ $line != $'\r' ]]; do :; done
timeout 5 cat <&3
[[ $status == 200 ]]
