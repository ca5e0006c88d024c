# ajet with PyTorch for CUDA and vLLM, for one machine with NVIDIA GPUs.
#   docker build -f docker/cuda.Dockerfile -t ajet:cuda .
#   docker run --gpus all -v "$PWD":/work ajet:cuda --conf my.yaml
# Not built by the tests.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3.12-venv python3.12-dev make git bubblewrap \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ajet
COPY . .
RUN python3.12 -m venv .venv && .venv/bin/pip install --no-cache-dir '.[train,lora,vllm,trackers,otel]'
ENV PATH=/opt/ajet/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["ajet"]
CMD ["--help"]
