#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the programs that tests and linters run, on Debian and its derivatives, and
# only those that are missing. Each line below names a command and the packages that
# contain it.
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
want gcc gcc libc6-dev # for the race detector
want ip iproute2
want nft nftables # for routers with NAT and packet filters, and to read the daemon's rules
want iptables-legacy iptables # contains both variants, for both families
want ethtool ethtool
want etcd etcd-server # an older server than the one that tests link
want openssl openssl # for the keys of an API server
want qemu-system-x86_64 qemu-system-x86 # for tests on another kernel, with cpio and kmod
want cpio cpio
want jq jq # used by commands in the documentation
want curl curl # used by commands in the documentation
want etcdctl etcd-client # used by commands in the documentation
want ping iputils-ping # used by commands in the documentation
want depmod kmod
want wg wireguard-tools
want tc iproute2
want iperf3 iperf3 # for the traffic of benchmarks
want shellcheck shellcheck
want promtool prometheus # with prometheus itself, which scrapes a daemon
want systemd-analyze systemd
want dpkg-deb dpkg # for the packages, like rpm
want rpm rpm
want chromium chromium # for the status page
want /usr/lib/cni/bridge containernetworking-plugins # called by the CNI plugin
want iptables iptables # used by these plugins
want runc runc # for real kubelets, like those below, which are for the images of their pods
want busybox busybox-static
want dig bind9-dnsutils
want nc netcat-openbsd
[ -n "$packages" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
	echo "deps: missing commands:$commands; without apt-get they have to be installed by hand" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "deps: missing packages:$packages; run 'make deps' as root" >&2
	exit 1
fi

# A package may start a service, but no etcd must be started on this machine.
policy=/usr/sbin/policy-rc.d
log=$(mktemp)
trap 'rm -f "$log"' EXIT
trap 'exit 1' INT TERM # runs the EXIT trap
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
