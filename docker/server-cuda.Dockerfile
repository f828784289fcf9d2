# SGLang with HiQCache on NVIDIA GPUs (x86-64, a driver for CUDA 13).
#
#   docker build -f docker/server-cuda.Dockerfile -t hiqcache/server-cuda:0.2.0 .
#
# Pin the base by digest where your registry shows one: --build-arg CUDA_IMAGE=nvidia/cuda@sha256:…
# Its CUDA is the one that torch's wheel is built for. The development image, at run time too: SGLang
# and FlashInfer compile kernels for the GPU that they find, with nvcc.
ARG CUDA_IMAGE=nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04

FROM ${CUDA_IMAGE} AS dependencies
# Ubuntu's archive keeps only the newest build of a package, so a pinned version stops building.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3.12 python3.12-venv python3.12-dev libnuma1 \
 && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3.12 -m venv /opt/venv
COPY requirements/cuda.lock /tmp/locks/
RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes -r /tmp/locks/cuda.lock

FROM dependencies AS package
COPY pyproject.toml README.md LICENSE /src/
COPY hiqcache /src/hiqcache
RUN /opt/venv/bin/python -m pip install --no-deps --no-build-isolation --prefix /overlay /src

# On top of the dependencies, not a copy of them: 10 GB less to build and to keep.
FROM dependencies
ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="HiQCache CUDA server" \
      org.opencontainers.image.description="SGLang with a quantised host KV tier" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Volumes take over the owner of the folder they are mounted on.
RUN groupadd --gid 10001 hiqcache \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hiqcache \
 && install -d -o 10001 -g 10001 /cache/models /cache/kernels /cache/hicache
COPY --from=package /overlay/ /opt/venv/
COPY docker/entrypoint.py docker/healthcheck.py /opt/hiqcache/
# The root file system may be read-only: what is written goes to /tmp and /cache. Kernels that were
# compiled once, for this GPU, are found again by the next container.
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/models \
    SGLANG_CACHE_DIR=/cache/kernels SGLANG_JIT_CACHE_DIR=/cache/kernels/jit \
    PORT=30000
USER 10001:10001
VOLUME ["/cache/models", "/cache/kernels"]
EXPOSE 30000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=30s --start-period=1800s --retries=4 \
  CMD ["python", "-I", "/opt/hiqcache/healthcheck.py"]
ENTRYPOINT ["python", "/opt/hiqcache/entrypoint.py"]
