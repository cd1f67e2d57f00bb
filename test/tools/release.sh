#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds all files of a release in OUT, from a tree without uncommitted changes, and signs
# the statement of their provenance. RELEASE_KEY is a file with the private key, RELEASE_PUB
# the file from which users get the public key, and RELEASE_BUILDER the URI of the builder:
# release.sh OUT VERSION MODULE GOARCH...
set -eu

out=$1 version=$2 module=$3
shift 3

fail() {
	echo "release: $1" >&2
	exit 1
}
[ -n "${RELEASE_KEY:-}" ] || fail "RELEASE_KEY is missing: set it to the file with the private key, which make release-key makes"
[ -r "$RELEASE_KEY" ] || fail "cannot read the private key $RELEASE_KEY"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
openssl pkey -in "$RELEASE_KEY" -pubout -out "$work/release.pub"
if [ -e "$RELEASE_PUB" ]; then
	cmp -s "$work/release.pub" "$RELEASE_PUB" || fail "$RELEASE_PUB is not the public key of $RELEASE_KEY"
else
	echo "release: $RELEASE_PUB does not exist, so nothing checks that users have the public key of $RELEASE_KEY" >&2
fi
[ -z "$(git status --porcelain)" ] || fail "the tree has uncommitted changes: commit them, or see git status"

# The newest stable release of Debian, so that the result does not depend on that of this machine.
export DEBIAN_SUITE="${DEBIAN_SUITE:-trixie}"
rm -rf "$out"
make --no-print-directory -j "$(nproc)" dist chart bin/tools/release VERSION="$version" OUT="$out" ARCHES="$*"

# The images contain the programs of the tarballs.
images=''
for arch in "$@"; do
	mkdir "$work/$arch"
	tar -xzf "$out/flannel-$version-linux-$arch.tar.gz" -C "$work/$arch"
	cp "$work/$arch/sbom.cdx.json" "$out/flannel-$version-linux-$arch.cdx.json"
	images="$images $arch=$work/$arch"
done
# shellcheck disable=SC2086 # a list of arguments
test/tools/image.sh "$out/flanneld-$version-linux.oci.tar" "docker.io/library/flanneld:$version" $images

rm "$out/SHA256SUMS"
statement=flanneld-$version.intoto.json
bin/tools/release sign -key "$RELEASE_KEY" -out "$work/$statement" -module "$module" -version "$version" \
	-commit "$(git rev-parse HEAD)" -builder "$RELEASE_BUILDER" -command "make release DEBIAN_SUITE=$DEBIAN_SUITE" "$out"/*
mv "$work/$statement" "$out/"
(cd "$out" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
bin/tools/release verify -key "$work/release.pub" "$out/$statement"
