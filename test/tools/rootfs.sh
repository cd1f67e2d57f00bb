#!/bin/sh
# Unpacks into DIR what the image needs besides our own programs, from Debian's
# packages: iptables in both variants, a busybox because manifests call cp and
# sh, and the certificates that servers are checked against: rootfs.sh DIR
set -eu

root=$1
packages='busybox-static ca-certificates iptables libc6 libip4tc2 libip6tc2 libmnl0 libnftnl11 libxtables12'

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
# Some releases have these folders below usr, some beside it: here they are the same.
for folder in bin sbin lib lib64; do
	mkdir -p "$work/all/usr/$folder"
	ln -s "usr/$folder" "$work/all/$folder"
done
for deb in *.deb; do
	dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$work/all"
done

# Of the C library only what the programs load, of the extensions only those of
# iptables; nothing to read.
cd "$work/all"
libs=$(dirname usr/lib/*-linux-*/libxtables.so.12)
mkdir -p "$root/usr/sbin" "$root/$libs/xtables" "$root/bin" "$root/run" "$root/tmp" "$root/etc/ssl/certs"
cp -a usr/sbin/xtables-*-multi "$root/usr/sbin/"
cp -a "$libs"/xtables/lib[ix][pt]*.so "$root/$libs/xtables/"
for lib in libc.so.6 libxtables.so.12 libmnl.so.0 libnftnl.so.11 libip4tc.so.2 libip6tc.so.2; do
	cp -L "$libs/$lib" "$root/$libs/"
done
# Programs name their loader by a path that is a link, in some packages an absolute
# one, which here would lead out of them. The file itself is beside the C library.
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
# As the package does when it is installed.
cat usr/share/ca-certificates/mozilla/*.crt >"$root/etc/ssl/certs/ca-certificates.crt"
