#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the tarball of one architecture twice from the last commit, in two directories
# that share only the module cache, and compares the results: reproducible.sh ARCH
set -eu

arch=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for place in a elsewhere/b; do
	git clone --quiet . "$work/$place"
	GOCACHE=$work/cache-$(basename "$place") make --no-print-directory -s -C "$work/$place" dist ARCHES="$arch"
	cat "$work/$place/dist/out/SHA256SUMS"
done
(cd "$work/a/dist/out" && sha256sum --quiet -c "$work/elsewhere/b/dist/out/SHA256SUMS") || {
	echo "reproducible: two builds of the same commit differ" >&2
	exit 1
}
