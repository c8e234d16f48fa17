#!/bin/sh
# Creates a CA, certificates and a token for the shards in $SERVERS (host:port,host:port), which are also reached as
# $HOSTS: on the first start, and again when the names change. authority/ keeps everything; shards/ and clients/ get the
# files that each side needs, never the CA's key.
set -eu
cd /certs
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
cd authority
cp -pu ca.pem token server.pem server-key.pem ../shards/
cp -pu ca.pem token ../clients/
