# The trainer, started by torchrun: see train.sh. From the repository's root:
#     docker build -f deploy/trainer.Dockerfile -t pic-trainer:0.3.0 .
# torch is the CUDA build of the default package index. For another one, the secret "pip" (a pip.conf) names PyTorch's own
# index, and REQUIREMENTS="-c constraints.txt setuptools .[trainer,parquet,s3,otel]" asks for no hashes. Neither that secret
# nor "pip-ca" (certificates that pip trusts) is in a layer.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE_IMAGE} AS build
# The compiler is for the weight server's compiled kernel, and stays in this stage. Without it NumPy computes the same.
RUN command -v gcc \
    || (apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*) \
    || echo "no C compiler: the weight server will compute with NumPy" >&2
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt deploy/trainer.lock ./
# Dependencies come first, in their own layer: they change seldom, and installing them takes minutes.
ARG REQUIREMENTS="--require-hashes -r trainer.lock"
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=pip-ca \
    mkdir weightserver trainer && touch README.md weightserver/__init__.py trainer/__init__.py \
    && pip install --no-cache-dir $REQUIREMENTS && rm -rf build
COPY README.md ./
COPY weightserver weightserver
COPY trainer trainer
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=pip-ca \
    pip install --no-cache-dir --no-deps --no-build-isolation --force-reinstall .

FROM ${BASE_IMAGE}
# The compiler is for --compile; tini passes signals on to a process that is still starting.
RUN (command -v g++ && command -v tini) \
    || (apt-get update && apt-get install --yes --no-install-recommends g++ tini && rm -rf /var/lib/apt/lists/*)
RUN useradd --uid 10001 --user-group --create-home pic && install -d -o pic -g pic /runs /certs
COPY --from=build /opt/venv /opt/venv
COPY deploy/train.sh deploy/health.sh /usr/local/bin/
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 OUTPUT=/runs/run XDG_CACHE_HOME=/runs/.cache \
    TORCHINDUCTOR_CACHE_DIR=/runs/.cache/torchinductor MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /runs
USER 10001:10001
ENTRYPOINT ["tini", "--", "train.sh"]
CMD ["fashion-mnist"]
