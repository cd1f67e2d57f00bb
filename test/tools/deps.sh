#!/bin/sh
# Installs what the tests and linters run, on Debian and its kin, and only what
# is missing: command, then the packages that bring it.
set -eu

want() {
	command -v "$1" >/dev/null 2>&1 || {
		commands="$commands $1"
		shift
		packages="$packages $*"
	}
}

commands='' packages=''
PATH=$PATH:/usr/sbin:/sbin
want gcc gcc libc6-dev # the race detector
want ip iproute2
want nft nftables # a router that translates addresses, and one that drops; and what the daemon has written
want iptables-legacy iptables # brings both variants, for both families
want ethtool ethtool
want etcd etcd-server # an older server than the one that is linked in
want openssl openssl # keys for an API server
want qemu-system-x86_64 qemu-system-x86 # a machine with another kernel, and what it is made of
want cpio cpio
want jq jq # the documentation has commands with this
want curl curl # and this
want etcdctl etcd-client # and this
want ping iputils-ping # and this
want depmod kmod
want wg wireguard-tools
want tc iproute2
want iperf3 iperf3 # a benchmark's traffic
want shellcheck shellcheck
want promtool prometheus # and prometheus itself, which scrapes a daemon
want systemd-analyze systemd
want buildah buildah # the image
want dpkg-deb dpkg # the package
want chromium chromium # the status page
want /usr/lib/cni/bridge containernetworking-plugins # what the CNI plugin delegates to
want iptables iptables # for those
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
	echo "deps: missing commands:$commands; without apt-get they have to be installed by hand" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "deps: missing packages:$packages; run 'make deps' as root" >&2
	exit 1
fi

# A package may start a service; nobody asked for an etcd on this machine.
policy=/usr/sbin/policy-rc.d
log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 1' INT TERM # so that the above happens
if [ ! -e "$policy" ]; then
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 755 "$policy"
	trap 'rm -f "$log" "$policy"' EXIT
fi

echo "deps: installing$packages"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of names
{ apt-get -q update && apt-get -qy install --no-install-recommends $packages; } >"$log" 2>&1 || {
	cat "$log" >&2
	echo "deps: cannot install$packages" >&2
	exit 1
}
