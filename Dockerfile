# `make image` makes the context: bin holds our programs, static and built by the
# same make build that everybody uses, and rootfs what manifests and the iptables
# rules need besides, from Debian's packages. So nothing is compiled under
# emulation, no registry is needed, and what is tested is what is packed.
FROM scratch AS root
COPY rootfs/ /
COPY bin/ /opt/bin/

FROM scratch
COPY --from=root / /
ENV PATH=/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["/opt/bin/flanneld"]
