# ajet with PyTorch for the CPU: debug, local on small models, the store, runners and the viewer.
#   docker build -f docker/cpu.Dockerfile -t ajet:cpu .
# Not built by the tests.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends make git bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/ajet
COPY . .
RUN make env && rm -rf /root/.cache
ENV PATH=/opt/ajet/.venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["ajet"]
CMD ["--help"]
