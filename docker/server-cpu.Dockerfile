# SGLang with HiQCache on a CPU, with a small real model inside: for the demo, the tests and CI.
#
#   docker build -f docker/server-cpu.Dockerfile -t hiqcache/server-cpu:0.2.0 .
#
# Pin the base by digest where your registry shows one: --build-arg PYTHON_IMAGE=python@sha256:…
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# The dependencies: 7 GB that change only with their lock. torch's wheel for Linux links against the
# CUDA libraries and does not import without them, so they are here although no GPU is.
FROM ${PYTHON_IMAGE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
COPY requirements/cpu.lock requirements/cpu-nodeps.lock requirements/mooncake.lock /tmp/locks/
RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes \
      -r /tmp/locks/cpu.lock -r /tmp/locks/cpu-nodeps.lock -r /tmp/locks/mooncake.lock

FROM dependencies AS model
COPY bench/__init__.py /src/bench/
COPY bench/lab/__init__.py bench/lab/models.py /src/bench/lab/
WORKDIR /src
RUN /opt/venv/bin/python -m bench.lab.models /opt/models/SmolLM2-135M-Instruct

FROM dependencies AS package
COPY pyproject.toml README.md LICENSE /src/
COPY hiqcache /src/hiqcache
RUN /opt/venv/bin/python -m pip install --no-deps --no-build-isolation --prefix /overlay /src

# On top of the dependencies, not a copy of them: neither stage holds a compiler.
FROM dependencies
# Mooncake's library is linked to it, though it goes over TCP here. Debian's archive keeps only the
# newest build of a package, so a pinned version stops building.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends libibverbs1 \
 && rm -rf /var/lib/apt/lists/*
ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="HiQCache CPU server" \
      org.opencontainers.image.description="SGLang with a quantised host KV tier, on a CPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Volumes take over the owner of the folder they are mounted on.
RUN groupadd --gid 10001 hiqcache \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hiqcache \
 && install -d -o 10001 -g 10001 /cache/hicache
COPY --from=model /opt/models /opt/models
COPY --from=package /overlay/ /opt/venv/
COPY docker/entrypoint.py docker/healthcheck.py /opt/hiqcache/
# The root file system may be read-only: what is written goes to /tmp.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    SGLANG_PLATFORM=hiqcache_cpu \
    MODEL=/opt/models/SmolLM2-135M-Instruct \
    PORT=30000
USER 10001:10001
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=30s --start-period=180s --retries=4 \
  CMD ["python", "-I", "/opt/hiqcache/healthcheck.py"]
ENTRYPOINT ["python", "/opt/hiqcache/entrypoint.py"]
