# An image that runs `tawpipe`, as a user without rights. For NVIDIA GPUs, with the build of torch for CUDA:
#
#     docker build --tag tawpipe .
#     docker run --gpus all --ipc host --volume "$PWD:/work" tawpipe train --data corpus.txt --output run
#
# Without a GPU, and much smaller:
#
#     docker build --tag tawpipe:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# The wheels of torch for CUDA bring CUDA's libraries along: the base needs none, and the host only a driver. Where one of
# CUDA's own bases is wanted nevertheless: --build-arg BASE=..., with Python 3.11 or newer as `python`.
ARG BASE=python:3.12-slim

# The wheel is built in a stage of its own, so that no source and no build tool is in the image.
FROM ${BASE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${BASE}
ARG TORCH_INDEX=https://pypi.org/simple
ARG EXTRAS=all
# Only --compile needs a compiler of C, which is left out: --build-arg PACKAGES=gcc
ARG PACKAGES=""
RUN if test -n "${PACKAGES}"; then \
        apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 1000 tawpipe && mkdir /work && chown tawpipe /work
# torch first, in a layer of its own: it is by far the largest, and stays as it is when only tawpipe changes.
RUN --mount=type=bind,source=requirements-ci.txt,target=/requirements.txt \
    python -m pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "$(grep '^torch==' /requirements.txt)"
# Then everything else, in the versions that the tests ran with.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,source=requirements-ci.txt,target=/requirements.txt \
    python -m pip install --no-cache-dir --constraint /requirements.txt "$(echo /dist/*.whl)[${EXTRAS}]"
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER tawpipe
# Runs, corpora and models go into /work and the caches into the home; both are meant to be volumes of the host.
WORKDIR /work
ENTRYPOINT ["tawpipe"]
CMD ["--help"]
