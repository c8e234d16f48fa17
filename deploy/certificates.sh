#!/bin/sh
# Creates a CA, certificates and a token for the shards in $SERVERS (host:port,host:port), which are also reached as
# $HOSTS: on the first start, and again when the names change. authority/ keeps everything; shards/ and clients/ get the
# files that each side needs, never the CA's key. With --daily it goes on, and renews certificates 30 days ahead: shards
# and clients read them without a restart.
set -eu
cd /certs
if [ "${1:-}" = --daily ]; then
    while "$0"; do sleep 86400; done
    exit 1
fi
hosts="$HOSTS $(echo "$SERVERS" | sed 's/:[0-9]*//g; s/,/ /g')"
if [ "$hosts" != "$(cat authority/hosts 2>/dev/null)" ]; then
    rm -rf authority/new
    # shellcheck disable=SC2086 # one word per host
    weightserver certs authority/new --host $hosts >/dev/null
    echo "certificates.sh: new certificates and a new token for $hosts"
    mv -f authority/new/* authority/
    rmdir authority/new
    echo "$hosts" >authority/hosts # last, so that an interrupted run starts again
fi
weightserver certs authority --renew-within 30
cd authority
hand_out() { # FOLDER FILE...: by content, as a copy that broke off is newer than what it was made of
    to=$1
    shift
    for file; do
        if ! cmp -s "$file" "$to/$file"; then
            cp -p "$file" "$to/.new"
            mv -f "$to/.new" "$to/$file"
        fi
    done
}
hand_out ../shards ca.pem token server-key.pem server.pem
hand_out ../clients ca.pem token
