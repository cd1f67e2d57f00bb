#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Process 1 of a node: mounts the node's own file systems and runs its services. The node
# ends when one of them ends:
# node.sh NAME ADDRESSES TOOLS KUBECONFIG VARIANT
set -euo pipefail

name=$1 addresses=$2 tools=$3 kubeconfig=$4 variant=$5
config=/var/lib/node
hostname "$name"
mount --make-rprivate /
mount -t proc proc /proc
umount --recursive --lazy /sys # with the cgroups of the machine
mount -t sysfs sysfs /sys

# A node must not change the machine's sysctls. kubelet finds its expected values in those
# that it checks.
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount --bind /proc/sys/net /proc/sys/net
mount -o remount,bind,rw /proc/sys/net
while read -r setting value; do
	echo "$value" >"/run/sysctl-$(basename "$setting")"
	mount --bind "/run/sysctl-$(basename "$setting")" "/proc/sys/$setting"
done <<'SETTINGS'
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
SETTINGS

# In a cgroup namespace a mount shows the node's own cgroups as the root.
if ! grep -qv '^0::' /proc/self/cgroup; then
	mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
	mount -t tmpfs -o mode=755 cgroups /sys/fs/cgroup
	while IFS=: read -r _ controllers _; do
		case $controllers in
		'') continue ;;
		name=*) mkdir "/sys/fs/cgroup/${controllers#name=}" && mount -t cgroup -o "none,$controllers" cgroup "/sys/fs/cgroup/${controllers#name=}" ;;
		*) mkdir "/sys/fs/cgroup/$controllers" && mount -t cgroup -o "$controllers" cgroup "/sys/fs/cgroup/$controllers" ;;
		esac
	done </proc/self/cgroup
fi

# The node's disk takes what programs write to these folders.
for folder in /etc /opt /var/log /usr/libexec; do
	mkdir -p "$config/disk$folder" "$config/work$folder"
	mount -t overlay -o "lowerdir=$folder,upperdir=$config/disk$folder,workdir=$config/work$folder" node "$folder"
done
mkdir -p /etc/cni/net.d /opt/cni/bin
cp "$tools"/cni/* /opt/cni/bin/
chown 997 /etc/cni/net.d /opt/cni/bin # as in clusters where these folders belong to another user
for program in iptables ip6tables; do
	for verb in '' -save -restore; do
		ln -sf "/usr/sbin/$program-$variant$verb" "/etc/alternatives/$program$verb"
	done
done
echo "nameserver 127.0.0.53" >/etc/resolv.conf # does not answer, so pods cannot resolve external names

export PATH=$tools/containerd:$PATH
containerd --config "$config/containerd.toml" >>/var/log/containerd.log 2>&1 &
until [ -S /run/containerd/containerd.sock ]; do # kubelet would end without it
	kill -0 $! && sleep 0.1
done
"$tools/kubernetes/kube-proxy" --config "$config/kube-proxy.json" >>/var/log/kube-proxy.log 2>&1 &
"$tools/kubernetes/kubelet" --config "$config/kubelet.json" --kubeconfig "$kubeconfig" \
	--hostname-override "$name" --node-ip "$addresses" --v=2 >>/var/log/kubelet.log 2>&1 &
set +e
wait -n
echo "a service of $name ended with $?"
