#!/bin/sh
# Makes a CA, certificates and a token for the shards in $SERVERS (host:port,host:port), reached as $HOSTS too: on the
# first start, and anew when the names are others. authority/ keeps everything, shards/ and clients/ get what each side
# needs; nobody else ever sees the CA's key.
set -eu
cd /certs
hosts="$HOSTS $(echo "$SERVERS" | sed 's/:[0-9]*//g; s/,/ /g')"
if [ "$hosts" != "$(cat authority/hosts 2>/dev/null)" ]; then
    rm -rf authority/new
    # shellcheck disable=SC2086 # a word each
    weightserver certs authority/new --host $hosts >/dev/null
    echo "certificates.sh: new certificates and a new token for $hosts"
    mv -f authority/new/* authority/
    rmdir authority/new
    echo "$hosts" >authority/hosts # last: whoever is stopped before begins anew
fi
cd authority
cp -pu ca.pem token server.pem server-key.pem ../shards/
cp -pu ca.pem token ../clients/
