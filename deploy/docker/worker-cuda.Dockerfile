# Never built or run. A worker on NVIDIA GPUs. torch brings CUDA 13, and the transfer engines are built for it; the driver comes
# from the machine (NVIDIA container toolkit).
#   docker build -f deploy/docker/worker-cuda.Dockerfile -t tandem-worker-cuda:0.1.0 .
# Pin the base by digest where you can: --build-arg PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH
# What we need, in a layer of its own: other sources leave it as it is.
COPY pyproject.toml LICENSE deploy/docker/constraints-cuda.txt ./
RUN pip install --constraint constraints-cuda.txt "torch==2.13.0" ".[engine,nixl-cu13,mooncake-cu13,otel]"
COPY service ./service
COPY bootstrap_server ./bootstrap_server
COPY transfer_backends ./transfer_backends
COPY engine ./engine
COPY router ./router
COPY disagg ./disagg
COPY deploy ./deploy
COPY planner ./planner
COPY tandem ./tandem
RUN pip install --no-deps --force-reinstall .

FROM ${PYTHON_IMAGE}
# gcc is Triton's, the others are the transfer engines' (rdma-core: the providers of RDMA cards).
# Debian keeps one version of a package in a release: to pin it would break the build with the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc ibverbs-providers libc6-dev libcurl4 libibverbs1 libnuma1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 tandem && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 30000 8998
HEALTHCHECK --interval=10s --timeout=10s --start-period=600s --start-interval=2s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=9)"]
ENTRYPOINT ["tandem", "serve"]
CMD ["--host=127.0.0.1", "--port=30000"]
