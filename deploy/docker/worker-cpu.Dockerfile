# A worker on CPUs, with both transfer engines and the small model that ships with Tandem.
#   docker build -f deploy/docker/worker-cpu.Dockerfile -t tandem-worker-cpu:0.1.0 .
# Pin the base by digest where you can: --build-arg PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH
# What we need, in a layer of its own: other sources leave it as it is.
COPY pyproject.toml LICENSE deploy/docker/constraints.txt ./
# torch without CUDA, from its own index; everything in one resolution, so that nothing brings a second torch.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --extra-index-url "${TORCH_INDEX}" --constraint constraints.txt "torch==2.13.0+cpu" ".[engine,nixl-cpu,mooncake-cpu,otel]"
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
# gcc compiles the attention kernel for the CPU it runs on; the others are Mooncake's.
# Debian keeps one version of a package in a release: to pin it would break the build with the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libcurl4 libibverbs1 libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 tandem && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 30000 8998
HEALTHCHECK --interval=10s --timeout=10s --start-period=600s --start-interval=2s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=9)"]
ENTRYPOINT ["tandem", "serve"]
CMD ["--host=127.0.0.1", "--port=30000"]
