#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the packages NAME.deb and NAME.rpm of compiled programs, reproducibly: build.sh DIRECTORY
# GOARCH VERSION NAME
set -euo pipefail

programs=$(realpath "$1") goarch=$2 version=$3 name=$(realpath "$4")
tree=$(realpath "$(dirname "$0")/../..")
tools=$tree/bin/tools/packages

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
ln -s "$programs" programs
ln -s "$tree" tree
MODULE=$(sed -n 's/^module //p' tree/go.mod)
export MODULE

# Programs of a package are in /usr/bin, those that an administrator installs in /usr/local/bin.
sed 's|^ExecStart=/usr/local/bin/|ExecStart=/usr/bin/|' tree/dist/systemd/flanneld.service >flanneld.service
sed 's|/usr/local/bin/mk-docker-opts|/usr/lib/flannel/mk-docker-opts|' tree/dist/systemd/docker-flannel.conf >docker-flannel.conf
gzip -9n <tree/CHANGELOG.md >changelog.gz

man() { # PAGE COMMAND SECTION SYNOPSIS DOES
	sed -zE 's/\[([^]]*)\]\([^)]*\)/\1/g' "tree/Documentation/$1" |
		awk -v name="$2" -v section="$3" -v synopsis="$4" -v does="$5" -v version="$version" \
			-v date="$(date -u -d "@${SOURCE_DATE_EPOCH:?}" +%F)" -f tree/dist/packages/man.awk |
		"$tools/go-md2man" | gzip -9n >"$2.$3.gz"
}
man flannelctl.md flannelctl 1 '**flannelctl** *COMMAND* [*ARGUMENT*]... [*--FLAG*[*=VALUE*]]...' 'operate flanneld'
man flags.md flanneld 8 '**flanneld** [*--FLAG*[*=VALUE*]]...' 'connect containers on different hosts'

case $goarch in
arm) ARCH=arm7 ;; # nfpm's name
*) ARCH=$goarch ;;
esac
VERSION=$(echo "${version#v}" | sed -E 's/-(alpha|beta|rc)/~\1/; s/-/+/g') # a pre-release sorts before the release
case $VERSION in # a commit without a tag sorts before all releases
[0-9]*.*) ;;
*) VERSION=0~$VERSION ;;
esac
export ARCH VERSION
"$tools/nfpm" package --config tree/dist/packages/nfpm.yaml --packager rpm --target "$name.rpm" >/dev/null
# nfpm packs files of this type only for RPM.
sed 's/, type: doc//' tree/dist/packages/nfpm.yaml | "$tools/nfpm" package --config - --packager deb --target "$name.deb" >/dev/null
