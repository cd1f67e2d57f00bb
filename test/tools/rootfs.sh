#!/bin/sh
# Unpacks into DIR what the image needs besides our own programs, from Debian's
# packages: iptables in both variants, and a busybox because manifests call cp
# and sh: rootfs.sh DIR
set -eu

root=$1
packages='busybox-static iptables libc6 libip4tc2 libip6tc2 libmnl0 libnftnl11 libxtables12'

command -v apt-get >/dev/null 2>&1 || {
	echo "image: without apt-get the image has no iptables: use nftables (EnableNFTables), or add iptables to it" >&2
	mkdir -p "$root"
	exit 0
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$root"
cd "$work"
# shellcheck disable=SC2086 # a list of names
apt-get -qq -o APT::Sandbox::User=root download $packages
for deb in *.deb; do
	dpkg -x "$deb" "$work/all"
done

# Of the C library only what the programs load, of the extensions only those of
# iptables; nothing to read.
cd "$work/all"
triplet=$(basename "$(find . -path '*-linux-*/libxtables.so.*' | head -n 1 | xargs dirname)")
mkdir -p "$root/usr/sbin" "$root/usr/lib/$triplet/xtables" "$root/bin" "$root/lib/$triplet" "$root/run" "$root/tmp" "$root/etc"
cp -a usr/sbin/xtables-*-multi "$root/usr/sbin/"
cp -a usr/lib/"$triplet"/xtables/lib[ix][pt]*.so "$root/usr/lib/$triplet/xtables/"
for lib in libc.so.6 libxtables.so.12 libmnl.so.0 libnftnl.so.11 libip4tc.so.2 libip6tc.so.2; do
	file=$(find . -name "$lib" | head -n 1)
	cp -L "$file" "$root/lib/$triplet/$lib"
done
loader=$(find . -name 'ld-linux*.so.*' -o -name 'ld64.so.*' | head -n 1)
mkdir -p "$root/$(dirname "$loader")"
cp -L "$loader" "$root/$loader"
[ ! -d lib64 ] || { mkdir -p "$root/lib64" && cp -L "$loader" "$root/lib64/"; }

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
