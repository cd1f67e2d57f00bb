#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the image for this machine's architecture with the first usable builder and
# writes it as an OCI archive: image.sh ARCHIVE NAME:TAG
set -eu

archive=$1 name=$2
mkdir -p "$(dirname "$archive")"
archive=$(cd "$(dirname "$archive")" && pwd)/$(basename "$archive")
rm -f "$archive"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/context" "$work/root" "$work/run"

# Docker's own builder writes archives only if containerd stores the images.
archives() {
	! docker buildx inspect | grep -q '^Driver: *docker$' ||
		docker info --format '{{.DriverStatus}}' | grep -q containerd
}

usable() {
	case $1 in
	docker) docker buildx version && docker info && archives ;; # the Docker client alone has neither of the first two
	*) command -v "$1" ;;
	esac >/dev/null 2>&1
}

builder=''
for b in buildah podman docker; do
	if usable "$b"; then
		builder=$b
		break
	fi
done
if [ -z "$builder" ]; then
	echo "image: no builder found: install buildah (apt-get install buildah), or podman, or start docker with buildx and a builder that writes archives (docker buildx create --use)" >&2
	exit 1
fi

make --no-print-directory build
"$(dirname "$0")/rootfs.sh" "$work/context/rootfs"
mkdir "$work/context/bin"
for program in flanneld flannelctl install-conf; do
	cp "bin/$program" "$work/context/bin/"
done
cp dist/mk-docker-opts.sh "$work/context/bin/"
cp bin/flannel "$work/context/bin/"
ln -s opt/bin/flannel "$work/context/rootfs/flannel" # manifests copy the plugin from this path

epoch=${SOURCE_DATE_EPOCH:-0}
case $builder in
buildah)
	export BUILDAH_ISOLATION=chroot
	storage="--storage-driver vfs --root $work/root --runroot $work/run"
	# shellcheck disable=SC2086 # a list of options
	buildah $storage bud --quiet --timestamp "$epoch" --tag "$name" --file Dockerfile "$work/context" >/dev/null
	# shellcheck disable=SC2086
	buildah $storage push --quiet "$name" "oci-archive:$archive:$name"
	;;
podman)
	podman build --quiet --timestamp "$epoch" --tag "$name" --file Dockerfile "$work/context" >/dev/null
	podman save --quiet --format oci-archive --output "$archive" "$name"
	;;
docker)
	docker buildx build --quiet --tag "$name" --file Dockerfile --output "type=oci,dest=$archive" "$work/context"
	;;
esac
echo "image: $name in $archive (built with $builder)"
