#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Unpacks into DIR the files of Debian packages that the image needs besides flanneld's
# own programs: iptables in both variants, busybox because manifests call cp and sh, and
# the CA certificates: rootfs.sh DIR
set -eu

root=$1
packages='busybox-static ca-certificates iptables libc6 libip4tc2 libip6tc2 libmnl0 libnetfilter-conntrack3 libnfnetlink0 libnftnl11 libxtables12'

command -v apt-get >/dev/null 2>&1 || {
	echo "image: without apt-get the image has no iptables, no sh, no cp and no CA certificates:" \
		"use nftables (EnableNFTables) and the manifests of this repository, or add them to it" >&2
	mkdir -p "$root"
	exit 0
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$root"
cd "$work"
# shellcheck disable=SC2086 # a list of names
apt-get -qq -o APT::Sandbox::User=root download $packages
# In some Debian releases these folders are below usr, in others beside it. The links
# make them the same.
for folder in bin sbin lib lib64; do
	mkdir -p "$work/all/usr/$folder"
	ln -s "usr/$folder" "$work/all/$folder"
done
for deb in *.deb; do
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
