#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the Debian package of compiled programs, reproducibly: build.sh DIRECTORY GOARCH
# VERSION PACKAGE
set -eu

programs=$1 goarch=$2 version=$3 package=$4
cd "$(dirname "$0")/../.."

case $goarch in # Debian's name of the architecture
arm) arch=armhf ;;
ppc64le) arch=ppc64el ;;
*) arch=$goarch ;;
esac
version=$(echo "${version#v}" | sed -E 's/-(alpha|beta|rc)/~\1/') # a pre-release sorts before the release
case $version in # a commit without a tag sorts before all releases
[0-9]*.*) ;;
*) version=0~$version ;;
esac

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
umask 022
chmod 755 "$root" # mktemp creates it for its owner only
put() { install -D -m "$1" "$2" "$root/$3"; }

put 755 "$programs/flanneld" usr/bin/flanneld
put 755 "$programs/flannelctl" usr/bin/flannelctl
put 755 "$programs/flannel" usr/lib/cni/flannel
put 755 dist/mk-docker-opts.sh usr/lib/flannel/mk-docker-opts.sh
put 600 dist/systemd/flanneld.env etc/flannel/flanneld.env
put 644 dist/rt_protos.d/flannel.conf etc/iproute2/rt_protos.d/flannel.conf
put 644 dist/systemd/flanneld-udp.conf usr/share/doc/flanneld/examples/flanneld-udp.conf
put 644 dist/systemd/flanneld-wireguard.conf usr/share/doc/flanneld/examples/flanneld-wireguard.conf
put 644 dist/debian/completion usr/share/bash-completion/completions/flannelctl
[ ! -e "$programs/sbom.cdx.json" ] || put 644 "$programs/sbom.cdx.json" usr/share/doc/flanneld/sbom.cdx.json
mkdir -p "$root/usr/lib/systemd/system"
# Programs of a package are in /usr/bin, those that an administrator installs in
# /usr/local/bin.
sed 's|^ExecStart=/usr/local/bin/|ExecStart=/usr/bin/|' dist/systemd/flanneld.service >"$root/usr/lib/systemd/system/flanneld.service"
sed 's|/usr/local/bin/mk-docker-opts|/usr/lib/flannel/mk-docker-opts|' dist/systemd/docker-flannel.conf >"$root/usr/share/doc/flanneld/examples/docker-flannel.conf"

# Counts like dpkg-gencontrol, so that the result does not depend on the size of
# directories in this file system.
size=$(find "$root" -printf '%y %s\n' | awk '{ kib += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print kib }')
put 755 dist/debian/postinst DEBIAN/postinst
put 755 dist/debian/prerm DEBIAN/prerm
put 755 dist/debian/postrm DEBIAN/postrm
(cd "$root" && find etc -type f | sort | sed 's|^|/|') >"$root/DEBIAN/conffiles"
# Replaces without Breaks: older packages of CNI plugins conflict only in the file
# flannel, and their other plugins are needed.
sed -e '/^#/d' -e "s|@ARCH@|$arch|" -e "s|@VERSION@|$version|" -e "s|@SIZE@|$size|" dist/debian/control.in >"$root/DEBIAN/control"
(cd "$root" && find usr -type f | sort | xargs md5sum) >"$root/DEBIAN/md5sums"

# All files get the date of the commit, so that the package is reproducible.
find "$root" -exec touch --no-dereference --date="@${SOURCE_DATE_EPOCH:?}" {} +
dpkg-deb --root-owner-group -Zxz "-z${DEB_LEVEL:-6}" --build "$root" "$package" >/dev/null
