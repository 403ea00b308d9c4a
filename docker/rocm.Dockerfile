# hybrid_jax on AMD's JAX training image: ROCm 7.14, Python 3.12, jax 0.10.0 with its ROCm plugin.
#
#   docker build -f docker/rocm.Dockerfile -t hybrid_jax:rocm .
#   docker run --rm -it --device=/dev/kfd --device=/dev/dri --group-add=video --ipc=host --shm-size=64g \
#     --user="$(id -u):$(id -g)" --env=USER --env=HOME=/tmp --security-opt=seccomp=unconfined \
#     --network=host --ulimit=memlock=-1 \
#     --volume="$PWD":/workspace/hybrid_jax hybrid_jax:rocm \
#     python3 launch.py --config=configs/gdn_300m.py:smoke --platform=rocm
#
# --device: the GPUs. --group-add=video: the group of their files (on some hosts it is `render`: give its number).
# --ipc: RCCL shares memory between processes, and fails in docker's 64 MB; where the host's may not be shared, leave
# --ipc out and --shm-size does. --user: runs/ then belongs to you. seccomp=unconfined: direct copies between GPUs.
# --network=host and memlock: several hosts, RDMA.
ARG IMAGE=rocm/jax-training:maxtext-v26.5
FROM ${IMAGE}

WORKDIR /workspace/hybrid_jax
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY hybrid_jax hybrid_jax

# The constraints hold the image's jax: without them pip may take a newer one, for which there is no ROCm plugin, and
# every run would be on the CPU. The last line fails the build if it did.
RUN python3 -m pip install --no-cache-dir -c constraints/jax-0.10.txt -e '.[triton,prepare,track]' \
 && python3 -c "import importlib.metadata as m; v = m.version('jax'); assert v.startswith('0.10.'), v; \
assert any('rocm' in d.metadata['Name'] and 'plugin' in d.metadata['Name'] for d in m.distributions()), 'no ROCm plugin'"

COPY configs configs
COPY launch.py ./
ENV PYTHONUNBUFFERED=1
CMD ["python3", "launch.py", "--help"]
