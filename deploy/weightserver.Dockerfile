# The weight server, without torch. From the repository's root:
#     docker build -f deploy/weightserver.Dockerfile -t pic-weightserver:0.3.0 .
# The optional secrets "pip" (a pip.conf) and "pip-ca" (certificates that pip trusts) are in no layer.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE_IMAGE} AS build
# The compiler is for the weight server's compiled kernel, and stays in this stage. Without it NumPy computes the same.
RUN command -v gcc \
    || (apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*) \
    || echo "no C compiler: the weight server will compute with NumPy" >&2
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/weightserver.lock ./
# Dependencies come first, in their own layer: they change seldom.
ARG REQUIREMENTS="--require-hashes -r weightserver.lock"
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=pip-ca \
    pip install --no-cache-dir $REQUIREMENTS
COPY README.md ./
COPY weightserver weightserver
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=pip-ca \
    pip install --no-cache-dir --no-deps --no-build-isolation --force-reinstall . && pip uninstall --yes setuptools pip

FROM ${BASE_IMAGE}
# It passes signals on to a process that is still starting.
RUN command -v tini \
    || (apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*)
RUN useradd --uid 10001 --user-group --create-home pic \
    && install -d -o pic -g pic /data /certs /certs/authority /certs/shards /certs/clients
COPY --from=build /opt/venv /opt/venv
COPY deploy/certificates.sh deploy/health.sh /usr/local/bin/
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
ENTRYPOINT ["tini", "--", "weightserver"]
CMD ["--help"]
