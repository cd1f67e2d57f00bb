#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Tries a cloud backend on three instances of a real account, and writes a record. Documentation/cloud-acceptance.md says
# what to prepare. The script reaches the instances as root by ssh; SSH replaces that command.
# shellcheck disable=SC2016 # the text in single quotes is for the shell of a host
set -eu

usage='usage: BACKEND='\''{"Type":"aws-vpc"}'\'' test/cloud-acceptance.sh HOST1 HOST2 HOST3'
[ $# = 3 ] || { echo "$usage" >&2; exit 2; }
: "${BACKEND:?$usage}"
NETWORK=${NETWORK:-10.5.0.0/16}
NETWORK6=${NETWORK6:-}
SSH=${SSH:-ssh -o BatchMode=yes}
BIN=${BIN:-bin}
RECORD=${RECORD:-cloud-acceptance-$(date -u +%Y%m%dT%H%M%SZ)}
mkdir -p "$RECORD"

say() { printf '%s %s\n' "$(date -u +%H:%M:%S)" "$*" | tee -a "$RECORD/record.txt"; }
on() { host=$1; shift; $SSH "$host" "$@" < /dev/null; }

# result STEP COMMAND... writes whether the command succeeds.
failed=0
result() {
	step=$1
	shift
	if "$@" >> "$RECORD/details.txt" 2>&1; then
		say "ok      $step"
	else
		say "FAILED  $step"
		failed=$((failed + 1))
	fi
	for h in "$host1" "$host2" "$host3"; do
		{ echo "== $step: $h"; on "$h" /tmp/flannelctl status || true; } >> "$RECORD/status.txt" 2>&1
	done
}

# ask STEP TEXT asks a person to change something in the cloud. Without a terminal the step is left out.
ask() {
	say "step    $1"
	printf '\n    %s\n\n' "$2"
	[ -t 0 ] || { say "left out: no terminal"; return 1; }
	printf 'Enter when done, s to leave it out: '
	read -r answer
	[ "$answer" != s ]
}

# says HOST TEXT succeeds if the status of a host has the text within three minutes.
says() { on "$1" "for i in \$(seq 90); do /tmp/flannelctl status | grep -q '$2' && exit 0; sleep 2; done; exit 1"; }
ready() { says "$1" '^flanneld *ready'; }
all_ready() { ready "$host1" && ready "$host2" && ready "$host3"; }

# pod HOST makes a pod: a namespace with the second address of the host's subnet. Its first address is that of the bridge.
pod() {
	on "$1" '. /run/flannel/subnet.env; a=${FLANNEL_SUBNET%.*}; ip netns del pod 2> /dev/null; ip link del cni0 2> /dev/null; set -e
		ip link add cni0 type bridge; ip addr add "$FLANNEL_SUBNET" dev cni0; ip link set cni0 up
		ip netns add pod; ip link add pod0 type veth peer name eth0 netns pod; ip link set pod0 master cni0 up
		ip -n pod addr add "$a.2/24" dev eth0; ip -n pod link set eth0 up mtu "$FLANNEL_MTU"; ip -n pod link set lo up
		ip -n pod route add default via "$a.1"; sysctl -qw net.ipv4.ip_forward=1'
}
pod_address() { on "$1" '. /run/flannel/subnet.env; echo "${FLANNEL_SUBNET%.*}.2"'; }
# matrix succeeds if each pod reaches each pod within some minutes: a route comes back after a --resync at the latest.
matrix() {
	for from in "$host1" "$host2" "$host3"; do
		for to in "$host1" "$host2" "$host3"; do
			on "$from" "for i in \$(seq 60); do ip netns exec pod ping -c 1 -W 2 $(pod_address "$to") && exit 0; sleep 1; done; exit 1" || return 1
		done
	done
}
pods() { pod "$host1" && pod "$host2" && pod "$host3" && matrix; }

# start HOST copies the programs to a host and starts the daemon.
start() {
	for program in flanneld flannelctl; do
		$SSH "$1" "cat > /tmp/$program.new && chmod 755 /tmp/$program.new && mv /tmp/$program.new /tmp/$program" < "$BIN/$program"
	done
	on "$1" "systemctl stop flanneld-acceptance 2> /dev/null; systemd-run --collect --unit=flanneld-acceptance /tmp/flanneld --etcd-endpoints=http://$store:2379 --resync=30s"
}

host1=$1
host2=$2
host3=$3
store=$(on "$host1" 'ip -4 -o addr show scope global' | awk 'NR == 1 { sub("/.*", "", $4); print $4 }')
config="{\"Network\":\"$NETWORK\",\"Backend\":$BACKEND}"
[ -z "$NETWORK6" ] || config="{\"Network\":\"$NETWORK\",\"EnableIPv6\":true,\"IPv6Network\":\"$NETWORK6\",\"Backend\":$BACKEND}"
say "$("$BIN/flanneld" --version 2>&1 | head -1), $config"

result "etcd runs on $host1" on "$host1" "systemctl stop etcd-acceptance 2> /dev/null; rm -rf /tmp/etcd-acceptance; systemd-run --collect --unit=etcd-acceptance etcd --data-dir=/tmp/etcd-acceptance --listen-client-urls=http://$store:2379 --advertise-client-urls=http://$store:2379"
result "the configuration is written" on "$host1" "for i in \$(seq 30); do ETCDCTL_API=3 etcdctl --endpoints=http://$store:2379 put /coreos.com/network/config '$config' && exit 0; sleep 1; done; exit 1"
for h in "$host1" "$host2" "$host3"; do result "the daemon of $h starts" start "$h"; done
result "all hosts are ready" all_ready
result "every pod reaches every pod" pods

if ask "a route is deleted" "Delete the route to the subnet of $host2 in the route table."; then
	result "the route is restored" matrix
fi
if ask "a gateway takes a route" "Replace the route to the subnet of $host2 by one to a gateway or a peering."; then
	result "the host names the route" says "$host2" 'does not replace it'
	ask "it goes" "Delete that route." && result "the host is ready again" ready "$host2"
fi
if ask "a permission is revoked" "Take the permission to create routes from the role of $host3, and delete its route."; then
	result "the host names the permission" says "$host3" 'is missing'
	ask "it comes back" "Give the permission back." && result "the host is ready again" ready "$host3"
fi
if ask "the quota is full" "Fill the table with routes outside of the network, up to the quota, and delete the route of $host3."; then
	result "the host names the quota" says "$host3" 'reached its limit'
	ask "an instance goes" "Terminate $host2: its route must make place for $host3 within some minutes." && result "$host3 gets the place" ready "$host3"
fi
if ask "an instance is created again" "Create $host2 again under the same name, and empty the table of the other routes."; then
	result "the daemon of $host2 starts" start "$host2"
	result "all hosts are ready" all_ready
	result "every pod reaches every pod" pods
	say "look after 45 minutes: the table must have three routes in the network for each family"
fi
for h in "$host1" "$host2" "$host3"; do on "$h" 'journalctl -u flanneld-acceptance --no-pager' > "$RECORD/log-$h.txt" 2>&1 || true; done
say "$failed steps failed; the record is in $RECORD"
[ "$failed" = 0 ]
