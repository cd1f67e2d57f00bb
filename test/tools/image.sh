#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Writes an OCI archive with an image for each architecture, from compiled programs and
# files of Debian packages. Nothing runs under emulation, and no container tools are needed.
# Beside the archive it writes the bill of materials of each image:
# image.sh ARCHIVE NAME:TAG GOARCH=PROGRAMS...
set -eu

archive=$1 name=$2
shift 2
tag=${name##*:} folder=$(dirname "$archive")
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

roots=''
for image in "$@"; do
	arch=${image%%=*} programs=${image#*=} root=$work/${image%%=*}
	"$(dirname "$0")/rootfs.sh" "$root" "$arch" "$work/packages"
	mkdir -p "$root/opt/bin"
	cp "$programs/flanneld" "$programs/flannelctl" "$programs/flannel" "$programs/install-conf" "$root/opt/bin/"
	bin/tools/sbom -packages "$work/packages" "$tag" "$root"/opt/bin/* >"$folder/flanneld-$tag-linux-$arch.cdx.json"
	cp dist/mk-docker-opts.sh "$root/opt/bin/"
	ln -s opt/bin/flannel "$root/flannel" # manifests copy the plugin from this path
	roots="$roots $arch=$root"
done
# shellcheck disable=SC2086 # a list of arguments
bin/tools/release image -name "$name" -out "$archive" $roots
echo "image: $name in $archive"
