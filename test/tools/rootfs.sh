#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks into DIR the files of Debian packages that the image needs besides flanneld's
# own programs: iptables in both variants, busybox because manifests call cp and sh, and
# the CA certificates. The packages are of the architecture that Go calls GOARCH, so no
# program of them can be run here. LIST gets their names, versions, architectures and
# SHA-256 sums. An architecture that the release of Debian does not have gets no files:
# rootfs.sh DIR GOARCH LIST
set -eu

root=$1 goarch=$2 list=$3
packages='busybox-static ca-certificates iptables libc6 libip4tc2 libip6tc2 libmnl0 libnetfilter-conntrack3 libnfnetlink0 libnftnl11 libxtables12'
# codename prints the name of this machine's release of Debian.
codename() {
	# shellcheck disable=SC1091 # a file of the system
	(. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME")
}
# Only the main part of a release is used. It changes only with Debian's point releases, so
# that images can be reproduced in between.
suite=${DEBIAN_SUITE:-$(codename || echo trixie)}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

case $goarch in # Debian's name of the architecture
arm) arch=armhf ;;
ppc64le) arch=ppc64el ;;
*) arch=$goarch ;;
esac

fail() {
	echo "image: $1" >&2
	exit 1
}
for program in apt-get dpkg-deb; do
	command -v "$program" >/dev/null 2>&1 || fail "$program is missing: install the packages apt and dpkg"
done
[ -e "$keyring" ] || fail "$keyring is missing: install the package debian-archive-keyring"
# The machine's own mirror, if the machine runs Debian.
# shellcheck disable=SC2016 # apt-get expands the variable
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/*$' || true)}
[ -n "$mirror" ] || fail "no mirror of Debian is configured: set DEBIAN_MIRROR to the URL of one"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$root" "$work/lists/partial" "$work/debs"
# A separate apt, because the machine may have another release and another architecture. It
# verifies the packages with Debian's keys.
echo "deb [arch=$arch target=Packages signed-by=$keyring] $mirror $suite main" >"$work/sources"
: >"$work/status"
apt() {
	apt-get -qq -o "Dir::Etc::SourceList=$work/sources" -o Dir::Etc::SourceParts=/dev/null \
		-o "Dir::State::Lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work" \
		-o "APT::Architecture=$arch" -o "APT::Architectures=$arch" -o APT::Sandbox::User=root \
		-o Acquire::Languages=none -o APT::Update::Error-Mode=any "$@"
}
apt update
if ! grep -q "^Architectures:.* $arch\\b" "$work"/lists/*_InRelease; then
	echo "image: Debian $suite does not have $arch: this image has no iptables, no sh, no cp and no CA certificates:" \
		"use nftables (EnableNFTables) and the manifests of this repository" >&2
	: >"$list"
	exit 0
fi
cd "$work/debs"
# shellcheck disable=SC2086 # a list of names
apt download $packages
cd "$work"
for deb in debs/*.deb; do
	# shellcheck disable=SC2016 # dpkg-deb expands the variables
	echo "$(dpkg-deb --show --showformat '${Package} ${Version} ${Architecture}' "$deb") $(sha256sum <"$deb" | cut -d ' ' -f 1)"
done >"$list"
# In some Debian releases these folders are below usr, in others beside it. The links
# make them the same.
for folder in bin sbin lib lib64; do
	mkdir -p "$work/all/usr/$folder"
	ln -s "usr/$folder" "$work/all/$folder"
done
for deb in debs/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$work/all"
done

# Copy only the libraries that the programs and the extensions load, only the extensions of
# iptables, and no documentation. If an extension cannot be loaded, iptables does not list
# the rules of other programs. kube-proxy's rules use the match statistic, which needs libm.
cd "$work/all"
libs=$(dirname usr/lib/*-linux-*/libxtables.so.12)
mkdir -p "$root/usr/sbin" "$root/$libs/xtables" "$root/bin" "$root/run" "$root/tmp" "$root/etc/ssl/certs"
cp -a usr/sbin/xtables-*-multi "$root/usr/sbin/"
cp -a "$libs"/xtables/lib[ix][pt]*.so "$root/$libs/xtables/"
for lib in libc.so.6 libm.so.6 libxtables.so.12 libmnl.so.0 libnftnl.so.11 libip4tc.so.2 libip6tc.so.2 \
	libnetfilter_conntrack.so.3 libnfnetlink.so.0; do
	cp -L "$libs/$lib" "$root/$libs/"
done
# A program names its loader by a path that may be a link. In some packages the link is
# absolute and would leave the unpacked tree. The file itself is beside the C library.
loader=$(head -c 4096 usr/sbin/xtables-nft-multi | LC_ALL=C grep -ao '/lib[0-9a-z]*/ld[0-9a-z_-]*\.so\.[0-9]')
mkdir -p "$root$(dirname "$loader")"
cp -L "$libs/$(basename "$loader")" "$root$loader"

for family in iptables ip6tables; do
	for verb in '' -save -restore; do
		ln -s xtables-nft-multi "$root/usr/sbin/$family-nft$verb"
		ln -s xtables-legacy-multi "$root/usr/sbin/$family-legacy$verb"
		ln -s xtables-nft-multi "$root/usr/sbin/$family$verb"
	done
done
cp bin/busybox "$root/bin/"
for applet in cat cp ls mkdir mv rm sh ip ping sed grep sort; do
	ln -s busybox "$root/bin/$applet"
done
# The package does the same when it is installed.
cat usr/share/ca-certificates/mozilla/*.crt >"$root/etc/ssl/certs/ca-certificates.crt"
