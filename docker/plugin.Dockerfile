# SGLang's own image, with HiQCache in it: two lines on top. Start SGLang as before, with
# HIQCACHE_CODEC=int8 and --enable-hierarchical-cache.
#
#   docker build -f docker/plugin.Dockerfile -t sglang-hiqcache .
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}
COPY . /opt/hiqcache
# Built with the setuptools that torch has brought along: nothing is fetched.
RUN pip install --no-cache-dir --no-deps --no-build-isolation --check-build-dependencies /opt/hiqcache
