#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Converts flannel's subnet file into options of the Docker daemon, written as variables
# for EnvironmentFile= of a systemd unit.
set -u

usage() {
	cat >&2 <<-EOF
		usage: $0 [-f FILE] [-d FILE] [-i] [-c] [-m] [-k KEY]

		  -f FILE  subnet file of flannel (default /run/flannel/subnet.env)
		  -d FILE  file to write (default /run/docker_opts.env)
		  -i       one variable for each option, and no other
		  -c       one variable with all options, and no other
		  -k KEY   name of that variable (default DOCKER_OPTS)
		  -m       leave masquerading to others: no --ip-masq option
	EOF
	exit 1
}

subnet_file=/run/flannel/subnet.env
output=/run/docker_opts.env
key=DOCKER_OPTS
individual=false combined=false masq=true

while getopts 'f:d:k:icmh' option; do
	case $option in
	f) subnet_file=$OPTARG ;;
	d) output=$OPTARG ;;
	k) key=$OPTARG ;;
	i) individual=true ;;
	c) combined=true ;;
	m) masq=false ;;
	*) usage ;;
	esac
done
shift $((OPTIND - 1))
[ $# -eq 0 ] || usage
case $key in
'' | [0-9]* | *[!A-Za-z0-9_]*)
	echo "$0: -k $key is not the name of a variable" >&2
	exit 1
	;;
esac
if ! $individual && ! $combined; then
	individual=true combined=true
fi

if [ -f "$subnet_file" ]; then
	case $subnet_file in
	*/*) ;;
	*) subnet_file=./$subnet_file ;; # without a slash the shell would search PATH
	esac
	# shellcheck source=/dev/null
	. "$subnet_file"
fi

# The variables of the options are read by name below.
# shellcheck disable=SC2034
[ -z "${FLANNEL_SUBNET:-}" ] || DOCKER_OPT_BIP="--bip=$FLANNEL_SUBNET"
# shellcheck disable=SC2034
[ -z "${FLANNEL_MTU:-}" ] || DOCKER_OPT_MTU="--mtu=$FLANNEL_MTU"
if $masq && [ -n "${FLANNEL_IPMASQ:-}" ]; then
	# Either flanneld or Docker masquerades.
	# shellcheck disable=SC2034
	case $FLANNEL_IPMASQ in
	true) DOCKER_OPT_IPMASQ=--ip-masq=false ;;
	false) DOCKER_OPT_IPMASQ=--ip-masq=true ;;
	*)
		echo "$0: FLANNEL_IPMASQ is $FLANNEL_IPMASQ in $subnet_file, expected true or false" >&2
		exit 1
		;;
	esac
fi

eval "all=\${$key:+\"\$$key \"}"
: >"$output" || exit 1
for name in $(set | sed -n 's/^\(DOCKER_OPT_[A-Za-z0-9_]*\)=.*/\1/p' | LC_ALL=C sort -u); do
	eval "value=\$$name"
	# shellcheck disable=SC2154 # eval sets it
	! $individual || printf '%s="%s"\n' "$name" "$value" >>"$output"
	all="$all $value"
done
! $combined || printf '%s="%s"\n' "$key" "$all" >>"$output"

# If the route to this host's subnet leads through another host, the subnet no longer
# belongs to this host.
if [ -n "${FLANNEL_SUBNET:-}" ] && command -v ip >/dev/null 2>&1; then
	address=${FLANNEL_SUBNET%/*}
	base=${address%.*}.$((${address##*.} - 1))/${FLANNEL_SUBNET#*/}
	# With -o all next hops of a route are on its line. The id of a next hop object may
	# precede "via".
	if ip -o route show | grep -q "^$base \(.* \)*via "; then
		echo "$0: $base is routed to another host" >&2
		exit 1
	fi
fi
