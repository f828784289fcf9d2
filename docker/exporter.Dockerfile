# The comparison exporter (`hiqcache exporter`) and the canary (`hiqcache canary`, by another entry
# point): no SGLang, no torch.
#
#   docker build -f docker/exporter.Dockerfile -t hiqcache/exporter:0.2.0 .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE}
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
COPY requirements/exporter.lock /tmp/locks/
RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes -r /tmp/locks/exporter.lock

ARG VERSION=0.2.0
LABEL org.opencontainers.image.title="HiQCache exporter" \
      org.opencontainers.image.description="Compares a BF16 and an INT8 server" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 hiqcache \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin hiqcache
COPY hiqcache /opt/hiqcache/hiqcache
ENV PATH=/opt/venv/bin:$PATH HOME=/tmp PYTHONPATH=/opt/hiqcache PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 9645 9647
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
  CMD ["python", "-m", "hiqcache.direct_http", "http://127.0.0.1:9645/healthz"]
ENTRYPOINT ["python", "-m", "hiqcache.cli", "exporter"]
CMD ["--host", "0.0.0.0"]
