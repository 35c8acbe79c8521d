# syntax=docker/dockerfile:1
#
# The images of Engram: --target operator, --target worker, --target worker-cuda. None has a shell, all run as an unprivileged user (65532).
#
#   docker build --target worker -t localhost/engram/worker:0.1.0 .     every stage, with pulled bases
#   cargo xtask images --from-source                          every stage, on bases built on this machine
#   cargo xtask images                                        the last stages only, with binaries and a base built on this machine
#
# RUST_BASE      a Debian with the toolchain of rust-toolchain.toml
# RUNTIME_BASE   has glibc, no older than that of RUST_BASE, libgcc and public CA certificates: stage runtime, or an image
# BINARIES       the stage with the programs: build, or prebuilt = the folder target/images of this checkout
ARG RUST_BASE=rust:1.95-bookworm
ARG RUNTIME_BASE=runtime
ARG BINARIES=build

FROM ${RUST_BASE} AS build
WORKDIR /source
COPY . .
# Reproducible programs: no paths of this build, and one codegen unit per crate.
ENV CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1 CARGO_PROFILE_RELEASE_STRIP=symbols CARGO_INCREMENTAL=0
ENV RUSTFLAGS="--remap-path-prefix=/source=. --remap-path-prefix=/usr/local/cargo=cargo"
RUN --mount=type=cache,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,target=/source/target,sharing=locked \
    cargo build --release --locked --package engram-operator --package engram-worker --bins \
    && install -D -m 0755 -t /programs target/release/engram-operator target/release/engram-worker

FROM scratch AS prebuilt
COPY target/images/engram-operator target/images/engram-worker /programs/

FROM ${BINARIES} AS programs

FROM ${RUST_BASE} AS libraries
# Includes the C libraries that a GPU driver links, without gconv and audit modules. Only the package's certificates are copied, not others that
# the build machine trusts.
RUN mkdir /base && cd /base \
    && dpkg-query --listfiles libc6 libgcc-s1 | grep -E '^(/usr)?/lib.*\.so(\.|$)' | grep -v -e /gconv/ -e /audit/ \
        | xargs cp --parents --dereference --target-directory=. \
    && mkdir -p etc/ssl/certs \
    && dpkg-query --listfiles ca-certificates | grep '\.crt$' | LC_ALL=C sort | xargs cat > etc/ssl/certs/ca-certificates.crt \
    && echo 'root:x:0:0::/:/sbin/nologin' > etc/passwd \
    && echo 'nonroot:x:65532:65532::/:/sbin/nologin' >> etc/passwd \
    && echo 'hosts: files dns' > etc/nsswitch.conf

FROM scratch AS runtime
COPY --from=libraries /base /

FROM ${RUNTIME_BASE} AS operator
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Engram operator" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=programs /programs/engram-operator /engram-operator
USER 65532:65532
EXPOSE 7440 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["/engram-operator"]

FROM ${RUNTIME_BASE} AS worker
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Engram worker" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=programs /programs/engram-worker /engram-worker
# Driver libraries to be mounted by a GPU node's container toolkit: older versions mount the CUDA library only on request.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
EXPOSE 7443 7444 7445 9090
STOPSIGNAL SIGTERM
# Kubernetes has its own probes and ignores this one.
HEALTHCHECK CMD ["/engram-worker", "healthcheck"]
ENTRYPOINT ["/engram-worker"]

# For nodes with NVIDIA GPUs. It contains no NVIDIA files: the program embeds its GPU code and loads the driver's library, which the node's
# container toolkit mounts for the GPUs of the pod; outside of Kubernetes for all GPUs.
# Repeats stage `worker`, since an image based on a stage names that stage in its history and is not reproducible.
FROM ${RUNTIME_BASE} AS worker-cuda
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="Engram worker for NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=programs /programs/engram-worker /engram-worker
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility NVIDIA_VISIBLE_DEVICES=all
USER 65532:65532
EXPOSE 7443 7444 7445 9090
STOPSIGNAL SIGTERM
HEALTHCHECK CMD ["/engram-worker", "healthcheck"]
ENTRYPOINT ["/engram-worker"]
