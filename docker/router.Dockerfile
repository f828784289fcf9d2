# The router in front of a fleet: SGLang's own (smg, once sglang-router), of which HiQCache changes
# nothing.
#
#   docker build -f docker/router.Dockerfile -t hiqcache/router:0.2.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
COPY requirements/router.lock /tmp/locks/
RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes -r /tmp/locks/router.lock

ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="HiQCache router" \
      org.opencontainers.image.description="SGLang's router, in front of a fleet" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 hiqcache \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hiqcache
COPY hiqcache/__init__.py hiqcache/direct_http.py /opt/hiqcache/hiqcache/
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONPATH=/opt/hiqcache PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 10001:10001
# 30000: requests; 29000: /metrics.
EXPOSE 30000 29000
# Answers 200 once a replica is healthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-m", "hiqcache.direct_http", "http://127.0.0.1:30000/readiness"]
ENTRYPOINT ["python", "-m", "smg.launch_router"]
