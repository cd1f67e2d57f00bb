# SPDX-License-Identifier: Apache-2.0

# `make image` builds the context. bin contains flanneld's static programs, as `make build`
# builds them. rootfs contains files of Debian packages that manifests and iptables rules
# need. So nothing is compiled under emulation, no registry is needed, and the image contains
# the tested programs.
FROM scratch AS root
COPY rootfs/ /
COPY bin/ /opt/bin/

FROM scratch
COPY --from=root / /
ENV PATH=/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["/opt/bin/flanneld"]
