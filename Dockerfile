# Halteres on the CPU of a Linux machine: `docker build -t halteres .`, then docs/install.md.
#
# With PyPI's torch, which computes on NVIDIA GPUs (3 GB more to download; not verified on a GPU):
#     docker build -t halteres:cuda --build-arg TORCH_FROM= .
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/*

FROM python AS wheel
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir hatchling
WORKDIR /source
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN /build/bin/python -m hatchling build --target wheel --directory /wheel

FROM python
# Where pip looks for torch. The default has builds without CUDA.
ARG TORCH_FROM="--index-url https://download.pytorch.org/whl/cpu"
ARG TORCH=torch==2.13.0
RUN python3 -m venv /opt/halteres && /opt/halteres/bin/pip install --no-cache-dir ${TORCH_FROM} ${TORCH}
COPY constraints.txt /opt/halteres/
COPY --from=wheel /wheel /wheel
RUN wheel=$(echo /wheel/*.whl) \
    && /opt/halteres/bin/pip install --no-cache-dir --constraint /opt/halteres/constraints.txt "${wheel}[mcp,postgres]" \
    && rm -r /wheel
# Environments run code of their authors: not as root, even within a container.
RUN useradd --create-home halteres && mkdir /data && chown halteres:halteres /data
USER halteres
WORKDIR /home/halteres
ENV PATH=/opt/halteres/bin:$PATH HALTERES_HOME=/data
VOLUME /data
ENTRYPOINT ["halteres"]
CMD ["--help"]
