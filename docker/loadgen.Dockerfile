# The load generator: Locust with this repository's workloads.
#
#   docker build -f docker/loadgen.Dockerfile -t hiqcache/loadgen:0.2.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
COPY requirements/loadgen.lock /tmp/locks/
RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes -r /tmp/locks/loadgen.lock

ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="HiQCache load generator" \
      org.opencontainers.image.description="Locust workloads that time tokens" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 hiqcache \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hiqcache
COPY loadtest /opt/hiqcache/loadtest
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONPATH=/opt/hiqcache PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 LOCUST_LOCUSTFILE=/opt/hiqcache/loadtest/locustfile.py \
    LOAD_METRICS_ADDRESS=0.0.0.0
WORKDIR /tmp
USER 10001:10001
# 8089: the web page; 9646: /metrics; 5557: Locust's workers.
EXPOSE 8089 9646 5557
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
  CMD ["python", "-m", "loadtest.health", "http://127.0.0.1:9646/metrics"]
ENTRYPOINT ["locust"]
