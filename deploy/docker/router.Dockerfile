# The router: no torch, no engine library.
#   docker build -f deploy/docker/router.Dockerfile -t tandem-router:0.1.0 .
# Pin the base by digest where you can: --build-arg PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH
# What we need, in a layer of its own: other sources leave it as it is.
COPY pyproject.toml LICENSE deploy/docker/constraints.txt ./
RUN pip install --constraint constraints.txt ".[k8s,otel]"
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
RUN groupadd --gid 10001 tandem && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tandem
COPY --from=build /opt/tandem /opt/tandem
ENV PATH=/opt/tandem/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/liveness', timeout=4)"]
ENTRYPOINT ["tandem", "router"]
CMD ["--host=127.0.0.1", "--port=8080"]
